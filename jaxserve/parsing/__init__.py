'''Turns the text of a completion into events while it arrives: think blocks, tool calls, content.

Each format has its module. The package knows text and events. It knows no request, no engine and
no JSON of the API, and never imports jax.

A parser reads one completion. ``push(text)`` adds the next piece of text and returns the events
that are certain now; ``finish()`` returns the events of the text that was held back until the end.
Joined events do not depend on where the text was cut, so a whole reply equals the joined stream.
Time is linear in the length of the text, and no text raises an exception.

- Text in no known format is content, unchanged. White space between prose and a call is dropped.
- A call begins (`ToolCallStart`) once its name is that of a tool and its arguments have begun.
  Until then its text is held back, and becomes content if it turns out not to be a call.
- A call that has begun stays a call, even if the text ends or breaks off within it. Such a call is
  not counted in ``num_complete_calls``, and its arguments are the beginning of a JSON object. The
  arguments of a complete call are one valid JSON object.
- Detokenize with special tokens shown: the tags of some formats are special tokens.

To add a format, write a module and a line in `registry.TOOL_PARSERS`. The module has a generator
function that reads a completion from beginning to end through a `Scanner`. Where it needs text that
has not arrived, ``yield from`` makes it wait:

    def shout(scan: Scanner) -> Reading[None]:
        """CALL name {"a": 1};"""
        while (yield from scan.find("CALL ")):        # releases the content before it
            name = yield from scan.run(NAME)
            yield from scan.skip()
            if not scan.out.knows(name) or (yield from scan.peek()) != "{":
                continue                              # not a call: find() makes it content
            scan.start_call(name)                     # drops the held text: it is markup
            if not (yield from stream_object(scan)):  # passes arguments on as they arrive
                continue
            if (yield from scan.match(";")):
                scan.drop()

No text is lost if the function returns early, or gives up on a call and searches for the next. It
never goes back in the text, which keeps the time linear.

A format can also have rules for structural tags, in `registry.CALL_RULES`. Requests that have a
grammar for the content and allow tool calls need these rules.
'''
