"""A predictor for tests that kill a worker: it is slow, and tells in which process it is."""

import os
import signal
import threading
import time
from pathlib import Path

from brainet_pl.batch import BatchPredictor


class Marked(BatchPredictor):
    """Writes a byte a batch to a file that is named after its process."""

    def __init__(self, folder, marks, **settings):
        super().__init__(folder, **settings)
        self.marks = marks

    def __call__(self, batch):
        time.sleep(0.05)
        with open(os.path.join(self.marks, str(os.getpid())), "a") as file:
            file.write("x")
        return super().__call__(batch)


def kill_one(marks, after=3):
    """Kill the process that wrote so many bytes first, by SIGKILL; a list that its number will be in."""
    killed = []

    def watch():
        while True:
            busy = [path for path in Path(marks).iterdir() if path.stat().st_size >= after]
            if busy:
                killed.append(int(busy[0].name))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    return killed
