"""moto's S3 server in a process of its own.

It is not started in this one: vLLM looks at the objects of every loaded module, and those of moto's web
framework refuse to be looked at.
"""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import urllib.request

SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def empty_s3_server() -> str:
    """The URL of the server, which is emptied; it is started once and ends with this process."""
    url = _start()
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).read()
    return url


@functools.cache
def _start() -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    assert process.stdout is not None
    return f"http://127.0.0.1:{int(process.stdout.readline())}"
