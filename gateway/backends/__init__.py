"""Whom the gateway calls: replicas that speak the window protocol, their groups, and upstream OpenAI servers."""
