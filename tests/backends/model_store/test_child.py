from __future__ import annotations

import sys
import threading
import time

from agentspec.backends.model_store.child import end_all, run


def test_status_and_output():
    done = run([sys.executable, "-c", "import os, sys; print(os.environ['A']); sys.exit('no')"], {"A": "b"})
    assert (done.returncode, done.stdout, done.stderr) == (1, "b\n", "no\n")


def test_ending_what_runs():
    ended: list[int] = []
    thread = threading.Thread(
        target=lambda: ended.append(run([sys.executable, "-c", "import time; time.sleep(60)"]).returncode)
    )
    thread.start()
    limit = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < limit:
        end_all()
        time.sleep(0.02)
    assert ended and ended[0] < 0
    end_all()
