"""Signed evidence of what was answered: made, kept, checked, computed again. Knows neither HTTP nor OpenAI's JSON."""
