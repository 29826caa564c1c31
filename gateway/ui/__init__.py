"""The page that the gateway serves to people: a playground and a dashboard."""
