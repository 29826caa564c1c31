"""SGLang as a backend: a plugin that teaches a stock SGLang server the window protocol, both roles."""
