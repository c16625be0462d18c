"""What is said of a PREFECT_API_URL that leads elsewhere."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from eagle3_core.errors import HostError

pytestmark = pytest.mark.orchestrator


def refusal(url):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.api import require_api

    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(HostError) as caught:
        require_api()
    return str(caught.value)


def test_an_address_without_api_is_told_what_is_missing(api):
    base = api.removesuffix("/api")
    for url in (base, f"{base}/"):
        assert refusal(url) == (
            f"there is no Prefect API at {url}: `/api` is missing at its end; set PREFECT_API_URL={api}"
        )


def test_an_address_with_another_path_is_told_what_was_answered(api):
    text = refusal(f"{api}/api")
    assert "does not answer (Client error '404 Not Found'" in text
    assert "mozilla" not in text


def test_the_page_of_a_servers_ui_is_not_taken_for_the_api(prefect_home):
    """With its UI a server answers 200 and a page, whatever it is asked."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<!DOCTYPE html>")

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert "`/api` is missing at its end" in refusal(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
