"""The OpenAI API without HTTP: requests to prompts and parameters, tokens to responses and chunks."""
