"""One state machine over all that may happen to a loader, in any order: files change, workers die, loops are left and
resumed elsewhere. At any time every sample that comes is right, and in the end nothing is left.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.chaos.accounting import Consumer, Disturber, Setting, nothing_left
from tests.chaos.loading import Photos
from tests.datasets import deadline

CLASSES, EACH = 3, 8
COUNT = CLASSES * EACH
SETTINGS = st.builds(
    Setting,
    ranks=st.integers(1, 4),
    threads=st.integers(1, 4),
    processes=st.sampled_from([0, 0, 0, 0, 0, 1]),
    readers=st.sampled_from(["auto", 0, 1]),
    prefetch=st.integers(1, 3),
    batch=st.sampled_from([3, 4, 8]),
)
INDICES = st.integers(0, COUNT - 1)
PHASES = (Phase.explicit, Phase.generate)
"""Without shrinking, which would take minutes: an example has few steps, and all of them are printed."""


class LoaderMachine(RuleBasedStateMachine):
    """A training's loop over changing files. `Consumer` checks each step, `Photos` knows what may come."""

    @initialize(
        setting=SETTINGS, policy=st.sampled_from(["replace", "skip", "raise"]), number=st.integers(0, 2**32 - 1)
    )
    def open(self, setting: Setting, policy: str, number: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.photos = Photos(self.directory, random.Random(number), classes=CLASSES, each=EACH)
        self.left = nothing_left()
        self.left.__enter__()
        self.disturber = Disturber(random.Random(number), Counter())
        self.consumer = Consumer(self.photos.config, self.photos.truth, setting, policy=policy)

    # --- the loop -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.consumer.running)
    @rule()
    def begin(self) -> None:
        self.consumer.begin()

    @precondition(lambda self: self.consumer.running)
    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        if self.consumer.run(steps) == "failed":  # a bad sample, and the policy is to raise
            self.photos.repair_all()
            self.consumer.restore()

    @precondition(lambda self: self.consumer.running)
    @rule()
    def finish(self) -> None:
        self.step(COUNT)

    @precondition(lambda self: self.consumer.running)
    @rule()
    def leave(self) -> None:
        self.consumer.leave()

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch: int) -> None:
        self.consumer.set_epoch(epoch)

    @rule(setting=SETTINGS)
    def resume(self, setting: Setting) -> None:
        """In new loaders, of the files that the state was taken with: of others it would be refused."""
        self.consumer.close()
        self.photos.repair_all()
        self.consumer.resume(setting)

    # --- what happens to it -------------------------------------------------------------------------------------------

    @rule(index=INDICES, what=st.sampled_from(["delete", "truncate", "overwrite", "replace", "rewrite"]))
    def change_file(self, index: int, what: str) -> None:
        if what in ("delete", "truncate", "overwrite") and not self.photos.may_damage(index):
            return
        getattr(self.photos, what)(index)

    @rule()
    def repair_files(self) -> None:
        self.consumer.leave()
        self.photos.repair_all()

    @rule()
    def kill_worker(self) -> None:
        self.disturber.kill()

    @rule()
    def pause_worker(self) -> None:
        self.disturber.pause()

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "consumer"):
            return
        self.disturber.__exit__()
        self.consumer.close()
        self.left.__exit__(None, None, None)
        shutil.rmtree(self.directory)


def run_machine(number: int, *, examples: int, steps: int) -> int:
    """Run the machine with a seed. Returns how many examples it ran at most."""

    class Seeded(LoaderMachine):
        """A separate class, because the seed is kept in it."""

    limits = settings(
        phases=PHASES,
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
    )
    run_state_machine_as_test(seed(number)(Seeded), settings=limits)
    return examples


@pytest.fixture(autouse=True)
def _in_time(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.ERROR, "gpuflow")  # a warning that is kept keeps a batch's memory through its exception
    with deadline(400):
        yield


TestLoader = LoaderMachine.TestCase
TestLoader.settings = settings(max_examples=12, stateful_step_count=20, deadline=None, phases=PHASES)
