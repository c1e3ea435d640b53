"""What every deployment must do. The whole test file of a deployment::

    class TestMine(DeploymentSuite):
        def make_deployment(self):
            return MyDeployment()

Its engines are toys (:mod:`hotswap.core.testing.engines`) that fail, fill up and start badly when they are told to.
"""

from collections.abc import Sequence

import pytest

from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import ConfigError, EngineStoppedError, QueueFullError
from hotswap.core.interfaces.deployment import Deployment, EngineClient, EngineFactory
from hotswap.core.interfaces.kvcache import CacheEvent
from hotswap.core.request import Request, RequestOutput, SamplingParams
from hotswap.core.testing.engines import ToyEngine
from hotswap.core.testing.fakes import continuation


class Fleet:
    """A deployment that runs, its engines by role, and what its clients got."""

    def __init__(self, deployment: Deployment) -> None:
        self.engines: list[ToyEngine] = []
        factories: list[EngineFactory] = []
        for role in deployment.roles():
            for _ in range(role.replicas):
                self.engines.append(ToyEngine(str(len(self.engines))))
                factories.append(self.engines[-1].factory(role.name))
        self.roles = [factory.role for factory in factories]
        self.client: EngineClient = deployment.start(factories, SystemClock().now)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, name: str, count: int = 5) -> Request:
        request = Request(name, [len(name), 2, 3], SamplingParams(temperature=0, max_tokens=count))
        self.client.add(request, self._sink)
        return request

    def _sink(self, output: RequestOutput) -> None:
        self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, most: int = 100) -> None:
        for _ in range(most):
            if not any([engine.step() for engine in self.engines]):
                return
        raise AssertionError(f"no end after {most} steps: {[engine.live for engine in self.engines]}")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.token_ids]

    def endings(self, name: str) -> list[str]:
        return [output.finish_reason.value for output in self.outputs.get(name, []) if output.finish_reason]

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert self.endings(request.id) == ["length"], f"{request.id} ended {self.endings(request.id)}"
            expected = continuation(request.prompt_token_ids, request.sampling.max_tokens or 0)
            assert self.tokens(request.id) == expected, f"{request.id} got other tokens than from one engine"
        assert not any(engine.live for engine in self.engines)


class DeploymentSuite:
    """Subclass it and provide ``make_deployment``, of two engines or more."""

    def make_deployment(self) -> Deployment:
        raise NotImplementedError("return a new instance of the deployment under test")

    def started(self) -> Fleet:
        return Fleet(self.make_deployment())

    def test_its_roles_are_named_once_and_ask_for_engines(self) -> None:
        roles = self.make_deployment().roles()
        assert roles and all(role.replicas >= 1 for role in roles)
        assert len({role.name for role in roles}) == len(roles)

    def test_every_request_gets_its_tokens_and_one_ending(self) -> None:
        fleet = self.started()
        requests = [fleet.add(f"r{i}" + "x" * (i % 3)) for i in range(12)]
        fleet.run()
        fleet.check(requests)

    def test_every_engine_is_listed_and_told_what_all_are_told(self) -> None:
        fleet = self.started()
        assert sorted(status.name for status in fleet.client.engines()) == [engine.name for engine in fleet.engines]
        assert fleet.client.reset() == 3 * len(fleet.engines), "reset() is the sum of the engines' pages"
        heard: list[str] = []
        fleet.client.watch(lambda events: heard.extend(key for event in events for key in event.keys))
        for engine in fleet.engines:
            engine.publish(CacheEvent("stored", "full", (f"page of {engine.name}",), 4))
        firsts = {f"page of {e.name}" for e, role in zip(fleet.engines, fleet.roles, strict=True)
                  if role == fleet.roles[0]}
        assert firsts <= set(heard), f"of the engines that requests come to first, {firsts - set(heard)} was not heard"
        assert len(heard) == len(set(heard)), "an event is told twice"
        fleet.client.drain(1.0)
        fleet.client.stop()
        for engine in fleet.engines:
            assert {"reset", "drain", "stop"} <= set(engine.calls), f"engine {engine.name} was told {engine.calls} only"
        with pytest.raises(EngineStoppedError):
            fleet.add("late")

    def test_an_abort_gives_one_ending_wherever_the_request_is(self) -> None:
        for steps in range(4):
            fleet = self.started()
            requests = [fleet.add(f"r{i}") for i in range(4)]
            for _ in range(steps):
                for engine in fleet.engines:
                    engine.step()
            fleet.client.abort("r1")
            fleet.client.abort("r1")
            fleet.client.abort("never seen")
            fleet.run()
            assert fleet.endings("r1") == ["abort"], f"after {steps} steps: {fleet.endings('r1')}"
            fleet.check([request for request in requests if request.id != "r1"])

    def test_an_id_that_lives_already_is_refused_and_the_first_one_goes_on(self) -> None:
        fleet = self.started()
        request = fleet.add("r")
        others: list[RequestOutput] = []
        fleet.client.add(request, others.append)
        assert [output.finish_reason for output in others] == ["error"]
        fleet.run()
        fleet.check([request])
        again = fleet.add("r")
        fleet.run()
        assert fleet.endings("r") == ["length", "length"], f"{again.id} cannot be used again after its end"

    def test_loads_count_what_lives(self) -> None:
        fleet = self.started()
        for i in range(3):
            fleet.add(f"r{i}")
        loads = fleet.client.loads()
        assert loads.running + loads.waiting == 3
        fleet.run()
        loads = fleet.client.loads()
        assert (loads.running + loads.waiting, loads.dispatched) == (0, 0)

    def test_a_full_engine_is_passed_over_and_only_when_all_are_full_is_a_request_refused(self) -> None:
        fleet = self.started()
        for engine in fleet.engines:
            engine.refuses = True
        with pytest.raises(QueueFullError):
            fleet.add("refused")
        assert "refused" not in fleet.outputs
        for engine, role in zip(fleet.engines, fleet.roles, strict=True):  # the last one of each role has room
            engine.refuses = role in fleet.roles[int(engine.name) + 1 :]
        request = fleet.add("r")
        fleet.run()
        fleet.check([request])

    def test_a_lost_engine_ends_its_own_requests_and_no_others(self) -> None:
        for lost in range(len(self.started().engines)):
            fleet = self.started()
            requests = [fleet.add(f"r{i}") for i in range(6)]
            doomed = set(fleet.engines[lost].live)
            fleet.engines[lost].fail("device lost")
            after = fleet.add("after")
            fleet.run()
            for request in requests:
                ending = fleet.endings(request.id)
                assert len(ending) == 1, f"{request.id} ended {ending}"
                assert request.id in doomed or ending == ["length"], f"{request.id} was elsewhere, and ended {ending}"
            fleet.check([after])
            assert fleet.client.failure is None and fleet.client.health() is None, "the others serve on"
            problems = {status.name: status.problem for status in fleet.client.engines()}
            assert problems[fleet.engines[lost].name], "engines() says nothing of the lost one"

    def test_when_every_engine_is_lost_it_says_so(self) -> None:
        fleet = self.started()
        for engine in fleet.engines:
            engine.fail("device lost")
        assert "device lost" in (fleet.client.failure or ""), f"failure is {fleet.client.failure!r}"
        assert fleet.client.health() is not None
        with pytest.raises(EngineStoppedError):
            fleet.add("r")

    def test_an_engine_that_cannot_be_started_stops_the_others_and_its_error_is_raised(self) -> None:
        deployment = self.make_deployment()
        engines = [
            (ToyEngine(f"{role.name}{i}"), role.name) for role in deployment.roles() for i in range(role.replicas)]
        factories = [engine.factory(role) for engine, role in engines]

        def refuse() -> EngineClient:
            raise ConfigError("the weights are green", "model")

        factories[-1] = factories[-1]._replace(start=refuse)
        with pytest.raises(ConfigError, match="the weights are green"):
            deployment.start(factories, SystemClock().now)
        assert all("stop" in engine.calls for engine, _ in engines[:-1]), "an engine that was started runs on"
