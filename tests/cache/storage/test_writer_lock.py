from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.cache.storage.writer_lock import WriterLock
from agentspec.errors import CacheLockedError


def test_the_holder_is_named_and_release_frees(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with pytest.raises(CacheLockedError, match=str(os.getpid())):
        WriterLock(tmp_path)
    lock.release()
    lock.release()
    WriterLock(tmp_path).release()


def test_a_killed_holder_does_not_block(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\nfrom agentspec.cache.storage.writer_lock import WriterLock\n"
        "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(CacheLockedError, match=str(holder.pid)):
            WriterLock(tmp_path)
        holder.kill()
    WriterLock(tmp_path).release()
