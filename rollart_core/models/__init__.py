"""Models: tokenizers, chat templates, tool calls and weights. No module here trains."""
