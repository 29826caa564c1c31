#!/usr/bin/env python3
"""`healthy PORT`: exits with 0 where the server in this container says that it is ready."""

import sys
import urllib.error
import urllib.request

try:
    urllib.request.urlopen(f"http://127.0.0.1:{int(sys.argv[1])}/healthz", timeout=4).close()  # our own
except (urllib.error.URLError, TimeoutError) as error:
    sys.exit(f"not healthy: {error}")
