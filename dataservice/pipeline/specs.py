"""The sizes that a pack's spec gives its images, and whether the spec agrees with itself.

Invariants: integers of the spec and the vision rules alone; a spec that passes `check_spec` can be
laid out without a read: its documents fit the pack, its patches the pixel array.
"""

from __future__ import annotations

from dataservice.core import vision
from dataservice.core.packspec import ImageSpec, ItemSpec, PackSpec
from dataservice.core.vision import VisionRules


def aligned(tokens: int, align: int) -> int:
    """Places that a document of so many tokens takes."""
    return -(-tokens // align) * align


def grid(image: ImageSpec, rules: VisionRules) -> tuple[int, int]:
    """(rows, columns) of patches, or of tiles."""
    return image.target_height // rules.side, image.target_width // rules.side


def num_rows(image: ImageSpec, rules: VisionRules) -> int:
    """Of `pixel_values`; more than the grid has where a thumbnail stands behind its tiles."""
    return vision.num_rows(image.target_height, image.target_width, rules)


def num_patches(image: ImageSpec, rules: VisionRules) -> int:
    return vision.num_patches(image.target_height, image.target_width, rules)


def image_tokens(image: ImageSpec, rules: VisionRules) -> int:
    return vision.image_tokens(image.target_height, image.target_width, rules)


def check_spec(spec: PackSpec, rules: VisionRules) -> None:
    """Raises ValueError for a spec that contradicts itself."""
    wrong = next(filter(None, (_wrong_item(item, rules) for item in spec.items)), "")
    tokens = sum(item.stop - item.start for item in spec.items)
    patches = sum(num_patches(image, rules) for item in spec.items for image in item.kept)
    places = sum(aligned(item.stop - item.start, spec.align) for item in spec.items)
    if not wrong and (tokens != spec.num_tokens or places > spec.pack_length):
        wrong = f"{tokens} tokens, said {spec.num_tokens}"
        wrong += f", {places} places aligned to {spec.align}" if spec.align > 1 else ""
        wrong += f", length {spec.pack_length}"
    if not wrong and spec.pack_length % spec.align:
        wrong = f"length {spec.pack_length} is no multiple of {spec.align}"
    if not wrong and patches != spec.num_patches:
        wrong = f"{patches} patches, said {spec.num_patches}"
    if wrong:
        raise ValueError(f"spec of pack {spec.pack_id}: {wrong}")


def _wrong_item(item: ItemSpec, rules: VisionRules) -> str:
    """What is wrong with it, for a person; empty when nothing is."""
    if not 0 <= item.start < item.stop <= item.total_tokens:
        return f"{item.key} has no tokens {item.start}:{item.stop} of {item.total_tokens}"
    if item.images and item.start:
        return f"{item.key} has images and begins at its token {item.start}"
    whole = item.stop == item.total_tokens
    if not 0 <= item.kept_images <= len(item.images) or (
        whole and item.kept_images < len(item.images)
    ):
        return (
            f"{item.key} keeps {item.kept_images} of {len(item.images)} images in its tokens "
            f"{item.start}:{item.stop} of {item.total_tokens}"
        )
    factor = rules.side * rules.group
    for image in item.images:
        if image.target_height % factor or image.target_width % factor:
            size = f"{image.target_width}x{image.target_height}"
            return f"{image.member} is planned as {size}, not in multiples of {factor}"
    needed = sum(image_tokens(image, rules) for image in item.kept)
    if needed > item.stop:
        return f"{item.key} keeps images of {needed} tokens in its first {item.stop}"
    return ""
