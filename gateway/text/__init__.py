"""Between text and tokens: templates of prompts, text of streamed tokens, tool calls in it, stop strings."""
