"""The window protocol over HTTP, in front of the embedded engine."""
