from __future__ import annotations

import pytest

from dataservice.masking import mask_parts, mask_urls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/a?v=1", "https://***@host/a?v=1"),
        ("https://me:p@ss@host/a", "https://***@host/a"),
        ("https://token@host", "https://***@host"),
        ("https://host/a@b.zip", "https://host/a@b.zip"),
        ("https://host/?mail=a@b", "https://host/?mail=a@b"),
        ("/data/a@b?sig=1", "/data/a@b?sig=1"),
        (
            "read https://h/a?X-Amz-Credential=AK%2F1&X-Amz-Date=2&X-Amz-Signature=ff at 0",
            "read https://h/a?X-Amz-Credential=***&X-Amz-Date=2&X-Amz-Signature=*** at 0",
        ),
        ("'https://h/a?sig=x%3D' and s3://k:s@b/y", "'https://h/a?sig=***' and s3://***@b/y"),
        (
            "https://h/a?AWSAccessKeyId=A&Signature=B",
            "https://h/a?AWSAccessKeyId=***&Signature=***",
        ),
        ("https://h/a?sv=1&se=2&sig=C", "https://h/a?sv=1&se=2&sig=***"),
    ],
)
def test_secrets_of_urls_are_masked(text: str, shown: str) -> None:
    assert mask_urls(text) == shown


def test_secrets_are_masked_outside_of_their_url_too() -> None:
    url = "https://me:hunter2@host/a?sig=abc123&v=1"
    text = "bad bucket 'me:hunter2@host', password hunter2, signature abc123, v 1"
    assert mask_parts(text, url) == "bad bucket '***@host', password ***, signature ***, v 1"
    assert mask_parts("plain", "/data/a") == "plain"
