"""HTTP/1.1 on both sides: the client and server protocols, and what reads and writes bodies. Knows no OpenAI JSON."""
