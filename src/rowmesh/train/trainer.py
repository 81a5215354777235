"""One training run: model, plan, shards, loop, evaluation, checkpoints."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Protocol

import torch

from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import DivergedError, InputError
from rowmesh.features import Batch, empty_like
from rowmesh.placement import Plan
from rowmesh.runtime.pipeline import Pipeline
from rowmesh.runtime.shard import shard
from rowmesh.topology import Link, Topology
from rowmesh.train.checkpoint import Checkpoints
from rowmesh.train.config import RunConfig
from rowmesh.train.finite import FiniteWatch
from rowmesh.train.folder import RunFolder
from rowmesh.train.forecast import forecast_run, plan_of
from rowmesh.train.inputs import checked
from rowmesh.train.metrics import ClickMetrics
from rowmesh.train.model import build_model
from rowmesh.train.optimiser import make_optimizer, set_learning_rates
from rowmesh.train.planning import measured
from rowmesh.train.ranking import RankingMetrics
from rowmesh.train.refresh import TierRefresh
from rowmesh.train.stop import Stop
from rowmesh.train.tally import StepRecord, Tally
from rowmesh.train.tracing import Tracing

__all__ = ["Listener", "Trainer"]


class Listener(Protocol):
    """What wants to hear of a run: a view, a file of metrics. Rank 0's listeners are called."""

    def show_plan(self, plan: Plan) -> None:
        """Before the first step."""

    def show_step(self, record: StepRecord) -> None:
        """After every step, one step late."""

    def show_evaluation(self, step: int, found: dict[str, Any]) -> None:
        """After every evaluation."""


class Trainer:
    """A run of ``config`` on ``mesh``; `run` runs it.

    Args:
        config: The same on all ranks.
        mesh: From `rowmesh.init_mesh`.
        folder: Where checkpoints go; its plan is kept when a run resumes. None writes nothing.
        resume: Whether to go on from the folder's last checkpoint.

    Raises:
        InputError, PlanError: On all ranks, if the settings do not fit the data or the mesh.

    Collective:
        All ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        *,
        folder: RunFolder | None = None,
        resume: bool = False,
    ) -> None:
        self.config, self.mesh = config, mesh
        self.num_steps = config.training.num_steps(config.data)
        self.model = build_model(config.model, config.data, seed=config.seed, device=mesh.device)
        topology, resumed = measured(mesh), folder if resume else None
        self.plan = on_rank_0(mesh, lambda: self._choose_plan(topology, resumed))
        self.forecast = on_rank_0(
            mesh, lambda: forecast_run(config, self.plan, self.model, topology)
        )
        self._refresh = TierRefresh(config, self.model, mesh, topology)
        shard(self.model, self.plan, mesh)
        self.optimizer = make_optimizer(config.optimiser, self.model)
        self.start = self.step = 0
        self._tally = Tally(mesh)
        self._step_seconds: list[float] = []
        self._last_batch: Batch | None = None
        self._checkpoints: Checkpoints | None = None
        self._finite: int | None = None  # the last step saved with finite numbers
        if folder is not None and (config.checkpoint.every is not None or resume):
            self._checkpoints = Checkpoints(
                folder.checkpoints, keep_last=config.checkpoint.keep_last
            )
        if resume:
            assert self._checkpoints is not None
            loaded = self._checkpoints.load(model=self.model, optimizer=self.optimizer, mesh=mesh)
            self.start = self.step = loaded.step
            if self.start > self.num_steps:
                raise InputError(
                    f"the run is at step {self.start}, beyond the {self.num_steps} steps that it "
                    f"is to have: set training.steps to more, or begin another run"
                )
            self._finite = loaded.extra.get("finite_step", loaded.step)
        self._saved = self.start if resume else None
        self._watch = FiniteWatch(config.training.on_nan, model=self.model, mesh=mesh)

    def _choose_plan(self, topology: Topology, resumed: RunFolder | None) -> Plan:
        config, stored = self.config, None
        if resumed is not None and config.plan.file is None:
            stored = resumed.stored_plan(topology, config.plan)
        if stored is not None:
            return stored
        return plan_of(config, self.model, topology)

    def run(
        self,
        *,
        listeners: Sequence[Listener] = (),
        stop: Stop | None = None,
        tracing: Tracing | None = None,
    ) -> dict[str, Any]:
        """Train to the end, or to the step after which all ranks know of a wish to stop.

        Args:
            listeners: Of this rank.
            stop: Whether this rank wants to stop.
            tracing: Records some of the steps.

        Returns:
            The same on all ranks, but for the times: what `ClickMetrics.result` says of the
            held-out batches; `RankingMetrics.result` where these have groups; ``bayes_auc``, the
            AUC of planted probabilities; ``bytes`` that all
            ranks sent in training, by link; ``train_s`` and ``samples_per_s`` of all ranks, both
            with the making of the data; ``step_s``, the median step without it; ``forecast``, the
            bytes that a rank should send a step and, if calibrated, its seconds; ``ranks``,
            ``steps`` done, ``not_finite_steps`` whose loss was not finite and ``skipped_steps``
            of them, the plan's ``exactness``, and ``is_stopped``, with ``saved_step``, the last
            step saved if any. A run stopped before its last evaluation ended has none.

        Raises:
            InputError: On all ranks, if a batch of one is wrong; the sentence names rank, step
                and place. Checkpoints on disk stay as they are.
            DivergedError: On all ranks, if a loss, a prediction or what would be saved is not
                finite (`FiniteWatch`).

        Collective:
            All ranks.
        """
        stop = stop or Stop(self.mesh)
        for listener in listeners:
            listener.show_plan(self.plan)
        totals = _Totals()
        try:
            is_stopped = self._fit([*listeners, totals], stop, tracing)
            if tracing is not None:
                tracing.finish()
            self._save_last(is_stopped)
        except (InputError, DivergedError):
            # On all ranks: the mesh stays usable, so nothing may be under way.
            self.mesh.trace.stop()
            _show([self._tally.flush()], listeners)
            if self._checkpoints is not None:
                self._checkpoints.wait()
            raise
        found: dict[str, Any] = {}
        if not is_stopped:
            found = self._evaluate(listeners, stop)  # a run that resumes repeats it
            is_stopped = not found
        return (
            found
            | totals.result()
            | {
                "step_s": median(self._step_seconds or [0.0]),
                "forecast": self.forecast.as_dict(),
                "ranks": self.mesh.world,
                "steps": self.step,
                "exactness": self.plan.exactness.value,
                **self._watch.counts(),
                "is_stopped": is_stopped,
                "saved_step": self._saved,
            }
        )

    def _fit(
        self, listeners: Sequence[Listener], stop: Stop, tracing: Tracing | None = None
    ) -> bool:
        """The steps; whether a stop was wanted."""
        config = self.config
        if self.step >= self.num_steps:
            return False
        if tracing is not None:
            tracing.begin_step(self.step + 1)
        clock = _Clock()
        with contextlib.closing(self._train_batches()) as batches:
            for batch in batches:
                self._tally.begin()
                record = self._train_step(batch, clock, stop)
                if tracing is not None:
                    tracing.end_step()
                is_last = self.step == self.num_steps
                due = [config.checkpoint.every, config.training.eval_every]
                records = [record]
                if is_last or any(n is not None and self.step % n == 0 for n in due):
                    records.append(self._tally.flush())
                is_stopping = _show(records, listeners)
                self._watch.check_losses(records, saved=self._finite)
                if not is_last:
                    self._at_step(listeners)
                if is_stopping and not is_last:
                    records = [self._tally.flush()]
                    _show(records, listeners)
                    self._watch.check_losses(records, saved=self._finite)
                    return True
                if tracing is not None and not is_last:
                    tracing.begin_step(self.step + 1)
                clock.skip()
        return False

    def _train_step(self, batch: Batch, clock: "_Clock", stop: Stop) -> StepRecord | None:
        lr = set_learning_rates(
            self.config.optimiser, self.optimizer, step=self.step, num_steps=self.num_steps
        )
        phase, start = self.mesh.trace.phase, time.perf_counter()
        with phase("dense forward"):
            losses = self.model(batch)
        with phase("backward"):
            self.mesh.mean(losses).backward()
        if self._watch.may_step(losses):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._step_seconds.append(time.perf_counter() - start)
        self.step += 1
        self._last_batch = batch
        self._refresh.saw(batch)
        with phase("tally"):
            return self._tally.end(
                self.step,
                losses=losses,
                lr=lr,
                seconds=clock.lap(),
                wants_stop=stop.reason is not None,
            )

    def _at_step(self, listeners: Sequence[Listener]) -> None:
        """What is due after this step: other hot rows, an evaluation, a checkpoint."""
        if self._refresh.is_due(self.step):
            self.plan = self._refresh.refresh(self.model, self.plan, self.optimizer)
        every, eval_every = self.config.checkpoint.every, self.config.training.eval_every
        if eval_every is not None and self.step % eval_every == 0:
            self._evaluate(listeners, Stop(self.mesh))  # whole: a run that resumes has it once
        if self._checkpoints is not None and every is not None and self.step % every == 0:
            self._save()  # last, so that what precedes a checkpoint is in the metrics

    def _save_last(self, is_stopped: bool) -> None:
        """Save the end of the run, if it saves any, and wait for what is being written."""
        settings = self.config.checkpoint
        is_wanted = settings.every is not None and (settings.on_interrupt or not is_stopped)
        if self._checkpoints is not None:
            if self._saved != self.step and is_wanted:
                self._save()
            self._checkpoints.wait()

    def _save(self) -> None:
        assert self._checkpoints is not None
        if self._watch.may_save(self.step, saved=self._finite):
            self._finite = self.step
        self._checkpoints.save(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            mesh=self.mesh,
            extra={"num_steps": self.num_steps, "finite_step": self._finite},
            asynchronous=self.config.checkpoint.asynchronous,
            spared=self._finite,
        )
        self._saved = self.step

    def _train_batches(self) -> Any:
        source, mesh = self.config.data, self.mesh
        batches = source.batches(rank=mesh.rank, world=mesh.world, start=self.step)
        chosen = itertools.islice(batches, self.num_steps - self.step)
        return Pipeline(self.model).batches(self._checked(chosen, self.step + 1, "step"))

    def _checked(self, batches: Iterator[Batch], first_step: int, what: str) -> Iterator[Batch]:
        return checked(
            batches,
            num_dense=self.config.data.num_dense,
            first_step=first_step,
            device=self.mesh.device,
            what=what,
        )

    @torch.no_grad()
    def _evaluate(self, listeners: Sequence[Listener], stop: Stop) -> dict[str, Any]:
        """Metrics of the model, and the AUC of the truth, on all held-out batches.

        The model is what a checkpoint would hold: shard groups that step apart are averaged. Empty
        if a rank was asked to stop, which then reads no more.
        """
        self.optimizer.sync()
        mesh, source = self.mesh, self.config.data
        held_out = source.held_out(rank=mesh.rank, world=mesh.world)
        chosen = itertools.islice(held_out, self.config.training.eval_batches)
        wanted = itertools.takewhile(lambda batch: stop.reason is None, chosen)
        loader = self._checked(wanted, 1, "held-out batch")
        if self._last_batch is None:  # a resumed run that has no step left
            first = next(source.batches(rank=mesh.rank, world=mesh.world))
            self._last_batch = first.to(mesh.device)
        found, best, ranked = ClickMetrics(), ClickMetrics(), RankingMetrics()
        for batch in mesh.batches(loader, empty=empty_like(self._last_batch)):
            logits = self.model.logits(batch.dense_features, batch.sparse_features)
            true = batch.true_probabilities
            found.update(logits, batch.labels, true)
            if true is not None:
                best.update(torch.logit(true), batch.labels)
            if batch.groups is not None:
                ranked.update(logits, batch.labels, batch.groups)
        if mesh.total(int(stop.reason is not None)):
            return {}
        whole, bayes = (
            ClickMetrics.from_state(mesh.total(metrics.state()).cpu()).result()
            for metrics in (found, best)
        )
        places = RankingMetrics.from_state(mesh.total(ranked.state()).cpu()).result()
        result = {**whole, "bayes_auc": bayes["auc"], **places}
        for listener in listeners:
            listener.show_evaluation(self.step, result)
        self._watch.check_predictions(self.step, result, saved=self._finite)
        return result


class _Clock:
    """Seconds of a step, without what is done between steps."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Since the last `lap` or `skip`."""
        passed = time.perf_counter() - self._start
        self._start += passed
        return passed

    def skip(self) -> None:
        """Begin here."""
        self._start = time.perf_counter()


class _Totals:
    """Bytes, samples and seconds of all steps."""

    def __init__(self) -> None:
        self._sent = {Link.HOST.value: 0, Link.CROSS.value: 0}
        self._samples, self._seconds = 0, 0.0

    def show_plan(self, plan: Plan) -> None:
        """Nothing to add up."""

    def show_evaluation(self, step: int, found: dict[str, Any]) -> None:
        """Nothing to add up."""

    def show_step(self, record: StepRecord) -> None:
        """Add one step."""
        self._samples += record.samples
        self._seconds += record.seconds
        for link, amount in record.by_link().items():
            self._sent[link] += amount

    def result(self) -> dict[str, Any]:
        """``bytes``, ``train_s``, ``samples_per_s``."""
        speed = self._samples / self._seconds if self._seconds else 0.0
        return {"bytes": self._sent, "train_s": self._seconds, "samples_per_s": speed}


def _show(records: Sequence[StepRecord | None], listeners: Sequence[Listener]) -> bool:
    """Tell the listeners; whether a rank asked for a stop."""
    arrived = [record for record in records if record is not None]
    for record in arrived:
        for listener in listeners:
            listener.show_step(record)
    return any(record.is_stopping for record in arrived)
