"""A file that is written once, from start to end, and hashed on the way."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

# Below it, handing over to another thread costs more than hashing.
_SHARED_BYTES = 1 << 20


class HashedFile:
    """A new file; at the end of a `with` block that succeeds it is on the disk.

    SHA-256 (1 to 2 GB/s) is about as fast as a good disk: a second thread takes it of each write
    while the first writes.
    """

    def __init__(self, path: Path) -> None:
        """Makes the file, with the permissions that the umask asks for."""
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "sha256")
        self.position = 0
        """Bytes that were written."""
        self.error: OSError | None = None
        """Why the last write failed, for writers that hide it."""

    def write(self, content: bytes | memoryview) -> int:
        """Writes bytes; they are hashed, too, when this returns.

        Raises:
            OSError: There is no room.
        """
        hashed = None
        if len(content) >= _SHARED_BYTES:
            hashed = self._hasher.submit(self._sha256.update, content)
        else:
            self._sha256.update(content)
        try:
            self._file.write(content)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashed is not None:
                hashed.result()
        self.position += len(content)
        return len(content)

    def flush(self) -> None:
        """Does nothing: flushed at the end."""

    def hexdigest(self) -> str:
        """SHA-256 of what was written, in hexadecimal digits."""
        return self._sha256.hexdigest()

    def __enter__(self) -> Self:
        """Gives the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the file, after it reached the disk if nothing failed."""
        self._hasher.shutdown()
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
