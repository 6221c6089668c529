"""The status page: static files, which show what /api/status and /api/step answer.

Invariants: nothing is loaded from elsewhere, and nothing on the page changes the service; what
stands in the data reaches the page as text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from dataservice.obs.web import Answer, Handler

__all__ = ["page_routes"]

_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/grid.js": ("grid.js", "text/javascript; charset=utf-8"),
}


def page_routes() -> dict[str, Handler]:
    """Path -> handler; the files are read once, here."""
    folder = files(__name__)
    return {
        path: _static(Answer(folder.joinpath(name).read_bytes(), content_type))
        for path, (name, content_type) in _FILES.items()
    }


def _static(answer: Answer) -> Handler:
    async def handle(_query: Mapping[str, str]) -> Answer:
        return answer

    return handle
