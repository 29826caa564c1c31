"""The operator's side of the gateway: what is kept and who serves it, looked at and purged. Apart from tenants' API."""
