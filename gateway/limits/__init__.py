"""Limits of tenants: how much they may use, counted here or in Redis for all gateways together."""
