"""OpenAI's chat completions API: requests in (request.py), responses and chunks out (response.py)."""
