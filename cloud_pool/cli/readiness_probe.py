"""The program `python3 -m causeway_server.cloud_pool.cli.readiness_probe [url]`: status 0 if the gateway is ready, else
1.

The default URL is the operators' address on loopback, whose response names the parts that are not ready. For exec
probes of Kubernetes: it uses only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import sys
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import urlopen

URL = "http://127.0.0.1:8190/readyz"
TIMEOUT_S = 8.0


def main(arguments: list[str]) -> int:
    url = arguments[0] if arguments else URL
    try:
        with urlopen(url, timeout=TIMEOUT_S) as response:
            response.read()
    except HTTPError as error:
        # The body names the tiers that are not ready and why; `kubectl describe pod` shows it.
        sys.stderr.write(f"{error.code} {error.read(2000).decode(errors='replace')}\n")
        return 1
    except (OSError, HTTPException) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
