"""Goes over files, or over the sources of a config, and yields what it finds as it finds it.

Invariants: a file that is bad, or cannot be read, is a finding; only what was asked for wrongly (no
such file, a wrong config) is an error. Records of a file that is given by itself find their images
in the archive of its own stem, then in the image roots given, then in the archives and folders
among the files given, then (of a local file) in the archives of its folder, then in that folder.
"""

from __future__ import annotations

import glob
import posixpath
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING

from dataservice.core.limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from dataservice.core.vision import VisionRules
from dataservice.errors import ArchiveError, DataError, StorageError
from dataservice.linting.findings import Finding, Kind
from dataservice.linting.kinds import FileKind, kind_by_name
from dataservice.linting.reach import Reach
from dataservice.linting.targets import Target, find, targets, unread
from dataservice.storage.backends import ObjectStat, local_path
from dataservice.storage.listing import FoundFile, SourceListing
from dataservice.storage.membertable import (
    AS_IT_IS,
    MAX_MEMBER_BYTES,
    TOO_LARGE,
    describe_problem,
)
from dataservice.storage.objects import ShardReader, Store
from dataservice.storage.probe import probe
from dataservice.storage.sources import SourceFiles

if TYPE_CHECKING:
    from dataservice.config import Config
    from dataservice.linting.pictures import Fetch, PictureChecker
    from dataservice.linting.places import Places
    from dataservice.linting.records import RecordLinter
    from dataservice.storage.archives import ImageFinder
    from dataservice.storage.counting import RecordCounter

DEADLINE_S = 10.0
"""Of one read, and of the decode of one picture."""
"""As of a run whose config says nothing of `workers.max_image_pixels` and `max_image_bytes`."""

_KINDS: dict[FileKind, Kind] = {"image": "image", "zip": "zip", "tar": "tar", "records": "jsonl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    digest: bool = False
    """Whether findings have the mean colour of pictures and the SHA-256 of members."""
    max_pixels: int = MAX_IMAGE_PIXELS
    max_image_bytes: int = MAX_IMAGE_BYTES
    vision: VisionRules = field(default_factory=VisionRules)
    """What lies under transparent pictures, and whether colour profiles count."""
    read_deadline_s: float = DEADLINE_S
    decode_deadline_s: float = DEADLINE_S


def lint_files(
    names: Sequence[str], roots: Sequence[str], options: Options, reach: Reach | None = None
) -> Iterator[Finding]:
    """Of files, and of all files below folders; `roots` are archives and folders of images, of
    which only those out of reach are findings.

    `reach` is kept up to date, here and below. Raises ConfigError for a name that is none.
    """
    with closing(_Linter(options, reach)) as linter:
        yield from linter.files(names, roots)


def lint_config(config: Config, *, digest: bool, reach: Reach | None = None) -> Iterator[Finding]:
    """Of the records of all sources, and of image roots that cannot be read.

    Raises ConfigError, StorageError.
    """
    from dataservice.pipeline.text import TextRenderer

    options = Options(
        digest=digest,
        max_pixels=config.workers.max_image_pixels,
        max_image_bytes=config.workers.max_image_bytes,
        vision=config.plan.vision,
        read_deadline_s=config.staging.deadline_s,
        decode_deadline_s=config.workers.decode_deadline_s,
    )
    counter = TextRenderer.build(config.text)
    return _lint_sources(config.sources, options, counter, reach, index_dir=config.index_dir)


def lint_mixture(
    path: str, roots: Sequence[str], *, digest: bool, reach: Reach | None = None
) -> Iterator[Finding]:
    """As `lint_config`, of the data sets that a mixture file names, by the defaults of a config;
    `roots` are more places of images.

    Raises ConfigError, StorageError.
    """
    from dataservice.config.settings import load_mixture
    from dataservice.pipeline.text import TextRenderer, TextSettings

    sources = load_mixture(path, images=roots)
    counter = TextRenderer.build(TextSettings())
    return _lint_sources(sources, Options(digest=digest), counter, reach, index_dir="")


def _lint_sources(
    sources: Sequence[SourceFiles],
    options: Options,
    counter: RecordCounter,
    reach: Reach | None,
    *,
    index_dir: str,
) -> Iterator[Finding]:
    with closing(_Linter(options, reach)) as linter:
        listings = [linter.listing(source, index_dir) for source in sources]
        for listing in listings:
            yield from linter.source(listing, counter)


class _Linter:
    """Owns what reads and decodes: close it.

    What only pictures or only records need is imported when there is one: of the memory of a
    process that looks at one small file, most would be that.
    """

    def __init__(self, options: Options, reach: Reach | None) -> None:
        self._options = options
        self._watched = reach is not None
        self._reach = reach or Reach()
        self._owned = ExitStack()
        self._store = self._owned.enter_context(closing(Store()))

    def close(self) -> None:
        self._owned.close()

    def files(self, names: Sequence[str], roots: Sequence[str]) -> Iterator[Finding]:
        deadline_s = self._options.read_deadline_s
        given = [(name, self._find(name)) for name in names]
        looked_in = [(name, self._find(name)) for name in roots]
        for name, root in looked_in:
            if isinstance(root, StorageError):
                yield _refused(unread(name, root))
        if self._watched:
            self._reach.expect_all([file for _, file in given])
        places = _places(_files(looked_in), _files(given))
        found = targets(given, self._store, deadline_s=deadline_s)
        for kind, group in groupby(found, key=lambda t: None if t.problem else t.kind):
            if kind == "image":
                yield from self._pictures(group)
                continue
            for target in group:
                if kind is None:
                    yield _refused(target)
                    continue
                self._reach.begin(target.file)
                if kind == "records":
                    yield from self._records(target, places)
                else:
                    yield from self._archive(target)
        self._reach.end()

    def listing(self, source: SourceFiles, index_dir: str) -> SourceListing:
        """Raises ConfigError, StorageError."""
        from dataservice.storage.listing import list_source

        deadline_s = self._options.read_deadline_s
        listing = list_source(source, self._store, deadline_s=deadline_s, leave_out=index_dir)
        self._reach.expect_all(listing.records)
        return listing

    def source(self, listing: SourceListing, counter: RecordCounter) -> Iterator[Finding]:
        source = listing.files
        for root in listing.roots:
            opened = self._opened.root(root)
            if isinstance(opened, ArchiveError):
                kind: Kind = "tar" if root.url.endswith(".tar") else "zip"
                yield Finding(file=root.url, kind=kind, reason=opened.reason)
        linter = self._record_linter(source, counter)
        for file, beside in zip(listing.records, listing.beside, strict=True):
            find_images = partial(self._opened.finder, source, beside, listing.roots)
            self._reach.begin(file)
            yield from self._lint_records(linter, file.url, file, find_images)
        self._reach.end()

    def _find(self, name: str) -> FoundFile | StorageError:
        """Raises ConfigError where there is none."""
        try:
            return find(name, self._store, deadline_s=self._options.read_deadline_s)
        except StorageError as error:
            return error

    def _pictures(self, group: Iterator[Target]) -> Iterator[Finding]:
        files: deque[tuple[str, FoundFile]] = deque()

        def fetches() -> Iterator[Fetch]:
            for target in group:
                files.append((target.name, target.file))
                yield partial(self._picture, target.file)

        for result in self._checker.check(fetches()):
            name, file = files.popleft()
            self._reach.begin(file)
            if isinstance(result, DataError):
                yield Finding(file=name, kind="image", reason=result.reason)
            else:
                yield Finding(
                    file=name,
                    kind="image",
                    reason=None,
                    width=result.width,
                    height=result.height,
                    mean_rgb=result.mean_rgb,
                )

    def _picture(self, file: FoundFile) -> tuple[bytes, None]:
        """The whole file, once its header is seen to be that of a picture."""
        size_bytes = file.stat.size_bytes
        if size_bytes > MAX_MEMBER_BYTES:
            raise ArchiveError(describe_problem(TOO_LARGE, AS_IT_IS, size_bytes))
        probe(partial(self._read, file), size_bytes)
        return self._read(file, 0, size_bytes), None

    def _archive(self, target: Target) -> Iterator[Finding]:
        from dataservice.linting.archives import lint_archive

        unpacked = 0
        for finding in lint_archive(
            target.name,
            "tar" if target.kind == "tar" else "zip",
            partial(self._read, target.file),
            target.file.stat.size_bytes,
            digest=self._options.digest,
        ):
            if finding.member is not None:
                unpacked += finding.size or 0
                self._reach.within(unpacked)
            yield finding

    def _records(self, target: Target, roots: Sequence[FoundFile]) -> Iterator[Finding]:
        linter = self._plain_records
        find_images = partial(self._finder, linter.files, target.file, roots)
        return self._lint_records(linter, target.name, target.file, find_images)

    def _lint_records(
        self,
        linter: RecordLinter,
        name: str,
        file: FoundFile,
        find_images: Callable[[], ImageFinder],
    ) -> Iterator[Finding]:
        try:
            yield from linter.lint(name, file, find_images(), self._reach.within)
        except (StorageError, FileNotFoundError) as error:
            yield Finding(file=name, kind="jsonl", reason=f"could not be read: {error}")

    def _finder(
        self, files: SourceFiles, file: FoundFile, roots: Sequence[FoundFile]
    ) -> ImageFinder:
        from dataservice.storage.listing import archives_beside

        deadline_s = self._options.read_deadline_s
        (beside,) = archives_beside([file.url], self._store, deadline_s=deadline_s)
        places = {root.url: root for root in (*roots, *self._neighbours(file.url))}
        places.pop(file.url, None)
        return self._opened.finder(files, beside, list(places.values()))

    def _neighbours(self, url: str) -> list[FoundFile]:
        """The archives of the file's folder, and the folder; nothing of a remote file."""
        if local_path(url) is None:
            return []
        folder = posixpath.dirname(url)
        deadline_s = self._options.read_deadline_s
        found = [
            path
            for pattern in ("*.zip", "*.tar")
            for path in self._store.glob(
                posixpath.join(glob.escape(folder), pattern), deadline_s=deadline_s
            )
            if kind_by_name(path) != "records"
        ]
        archives = [
            FoundFile(url=path, stat=self._store.stat(path, deadline_s=deadline_s))
            for path in found
        ]
        stat = ObjectStat(size_bytes=0, mtime_ns=0, is_folder=True)
        return [*archives, FoundFile(url=folder, stat=stat)]

    def _read(self, file: FoundFile, offset: int, size: int) -> bytes:
        """Fewer bytes only past the end. Raises StorageError."""
        deadline_s = self._options.read_deadline_s
        data = self._store.read(file.url, offset, size, deadline_s=deadline_s)
        if len(data) < min(size, file.stat.size_bytes - offset):
            raise StorageError(f"{file.url} became shorter while it was read")
        return data

    @cached_property
    def _checker(self) -> PictureChecker:
        from dataservice.linting.pictures import PictureChecker
        from dataservice.pipeline.decoding import DecodeLimits

        options = self._options
        limits = DecodeLimits(
            deadline_s=options.decode_deadline_s,
            max_pixels=options.max_pixels,
            max_bytes=options.max_image_bytes,
        )
        return self._owned.enter_context(
            closing(PictureChecker(digest=options.digest, rules=options.vision, limits=limits))
        )

    @cached_property
    def _opened(self) -> Places:
        from dataservice.linting.places import Places

        deadline_s = self._options.read_deadline_s
        return self._owned.enter_context(closing(Places(self._store, None, deadline_s=deadline_s)))

    @cached_property
    def _plain_records(self) -> RecordLinter:
        from dataservice.pipeline.text import TextRenderer, TextSettings

        counter = TextRenderer.build(TextSettings())
        return self._record_linter(SourceFiles(name="", records=()), counter)

    def _record_linter(self, source: SourceFiles, counter: RecordCounter) -> RecordLinter:
        from dataservice.linting.records import RecordLinter

        deadline_s = self._options.read_deadline_s
        return RecordLinter(
            files=source,
            counter=counter,
            store=self._store,
            reader=ShardReader(None, deadline_s=deadline_s, store=self._store),
            checker=self._checker,
            deadline_s=deadline_s,
        )


def _files(found: Sequence[tuple[str, FoundFile | StorageError]]) -> list[FoundFile]:
    return [file for _, file in found if isinstance(file, FoundFile)]


def _places(roots: list[FoundFile], given: list[FoundFile]) -> list[FoundFile]:
    """In the order in which records of a file that is given look into them."""
    folders = [file for file in given if file.stat.is_folder]
    archives = [file for file in given if file.url.lower().endswith((".zip", ".tar"))]
    return [*roots, *folders, *archives]


def _refused(target: Target) -> Finding:
    return Finding(file=target.name, kind=_KINDS[target.kind], reason=target.problem)
