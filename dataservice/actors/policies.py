"""What a run does about pictures that cannot be had, and how a resume is held to it.

Invariants: packs of one run are all built under one policy; the text that names what built them
("built by") is the decoders' fingerprint and the policy, and a text without a policy means `hole`.
"""

from __future__ import annotations

from typing import Literal, get_args

from dataservice.actors.holes import Hole
from dataservice.errors import DataError, ImageError, RecordError, ResumeRefused

Policy = Literal["hole", "fallback", "fail"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
_POLICY = "; errors.bad_image "


def built_by(decoder: str, policy: str) -> str:
    return decoder + _POLICY + policy


def decoder_and_policy(text: str) -> tuple[str, str]:
    """Of a `built_by` text."""
    decoder, named, policy = text.rpartition(_POLICY)
    return (decoder, policy) if named else (text, "hole")


def policy_of(text: str) -> Policy:
    """Of a `built_by` text of a saved state."""
    policy = decoder_and_policy(text)[1]
    for known in POLICIES:
        if policy == known:
            return known
    raise ResumeRefused(
        f"the saved state has errors.bad_image {policy}, should be one of {', '.join(POLICIES)}: "
        "it is damaged or was changed"
    )


def check_policy(*, saved: str, now: str, what: str) -> None:
    """Raises ResumeRefused when a run (`what`) would go on under another policy than it began."""
    if saved != now:
        raise ResumeRefused(
            f"{what} has errors.bad_image {saved}, this service {now}: serve with "
            f"errors.bad_image: {saved}, because packs under the other have other bytes, or start "
            "a new run without a state"
        )


def failure_of(hole: Hole) -> DataError:
    """What the job fails with where no hole is allowed."""
    kind = RecordError if hole.image is None else ImageError
    inside = f" (in {hole.source}/{hole.archive})" if hole.archive else ""
    return kind(
        f"{hole.reason}{inside}; errors.bad_image is fail: repair or remove it and run "
        "`dataservice index`, or set errors.bad_image to hole or fallback",
        source=hole.source,
        shard=hole.shard,
        sample=hole.sample,
        member=hole.member,
    )
