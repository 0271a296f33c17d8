"""The OpenAI API without HTTP: requests to prompts and parameters, tokens to replies and chunks."""
