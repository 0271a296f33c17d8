'''Model text to events, as it arrives: think blocks and tool calls, one module a format.

A parser belongs to one answer. ``push(text)`` takes the next piece of its text and returns the
events that are certain by now, ``finish()`` returns what had to wait for the end. The reply to a
request that does not stream is made by the same two calls, so the two cannot differ: events joined
are the same wherever the text was cut. Time is linear in the length of the text, whatever a model
writes, and no text raises an exception.

- Text in no known form is content, to the letter. White space between prose and a call is not.
- A call is announced (`ToolCallStart`) when its name is one of the tools and its arguments have
  begun. Until then all of its text is held back, and becomes content if it does not turn out so.
- After that it stays a call, even if the text ends or goes wrong within it: such a call is not
  counted in ``num_complete_calls``, and its arguments are the beginning of a JSON object. The
  arguments of a complete call are one valid JSON object.
- Decode with special tokens shown: the marks of some formats are special tokens.

To add a format, write one file and one line in `registry.TOOL_PARSERS`. The file has a generator
function that reads the answer from beginning to end through a `Scanner`, in the order in which it
is written; where it needs text that has not arrived, it waits by itself (``yield from``):

    def shout(scan: Scanner) -> Steps[None]:
        """CALL name {"a": 1};"""
        while (yield from scan.find("CALL ")):        # content before it is passed on
            name = yield from scan.run(NAME)
            yield from scan.skip()
            if not scan.out.knows(name) or (yield from scan.peek()) != "{":
                continue                              # no call: find() makes it content
            scan.start_call(name)                     # what was held back is markup
            if not (yield from stream_object(scan)):  # arguments are passed on as they come
                continue
            if (yield from scan.match(";")):
                scan.drop()

Nothing else is needed: a function that returns, or gives up on a call and searches on, loses no
text. Never go back in the text; that keeps the time linear.

A format can also have rules, in `registry.CALL_RULES`: with them a model is held to calls in that
form where an answer is either calls or a text with a grammar.
'''
