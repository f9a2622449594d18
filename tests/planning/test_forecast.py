"""How long runs take, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.common.gpus import Device
from ensemble.members.footprint import Activation, Footprint, Weights
from ensemble.pipeline.run_report import RunReport, measured_speeds
from ensemble.planning import forecast
from ensemble.planning.forecast import Demand, Speed, calibrated, guessed_speed
from tests.cli.reports import member, report
from tests.sampling import tries


def job(
    startup: float, compute: float, gpus: int = 1, replicas: int = 2, devices: str = "ABCDEFGH"
) -> Demand:
    return Demand(startup, compute, gpus, replicas, tuple(devices), cpu_share=0 if gpus else 1)


def total_seconds(jobs: list[Demand], gpus: int) -> float:
    return forecast.total_seconds(jobs, dict.fromkeys("ABCDEFGH"[:gpus], 1))


def test_members_share_the_gpus() -> None:
    assert total_seconds([], 2) == 0
    assert total_seconds([job(10, 100, replicas=1)], 2) == 110
    assert total_seconds([job(10, 100)], 2) == 60
    assert total_seconds([job(10, 100), job(10, 100)], 2) == 110, "each is loaded once"
    assert total_seconds([job(10, 1000), job(10, 100)], 2) == 560, (
        "the shorter one's GPU joins the longer one"
    )
    assert total_seconds([job(10, 1000, replicas=1), job(10, 100, replicas=1)], 2) == 1010, "or may not"


def test_members_on_the_cpu_and_over_several_gpus() -> None:
    on_cpu = job(5, 300, gpus=0, replicas=1)
    assert total_seconds([job(10, 100, gpus=2, replicas=1), on_cpu, job(10, 50, replicas=1)], 2) == 305
    assert total_seconds([on_cpu, on_cpu], 0) == 610, "the CPU takes one member at a time"
    assert total_seconds([on_cpu, on_cpu, job(10, 50)], 1) == 610, "which keeps no GPU waiting"


def test_members_that_fit_only_one_gpu_take_turns_on_it_and_keep_nobody_else_waiting() -> None:
    large = job(10, 100, replicas=1, devices="B")
    assert total_seconds([large, large], 2) == 220
    assert total_seconds([large, large, job(10, 500, replicas=1)], 2) == 510


def of_two(startup: float = 10.0, per_work: float = 0.5) -> RunReport:
    measured = member("a", speed=Speed(startup, per_work, per_work > 0, startup > 0))
    return report(
        measured, member("b", speed=Speed(0.0, 0.0, False)), devices=(Device("GPU-1", "T4", (7, 5), 16, 1),)
    )


def test_speeds_come_from_members_that_were_computed_alike() -> None:
    same = {"a": "same", "b": "same"}
    assert measured_speeds(of_two(), ["T4", "T4"], same) == {"a": Speed(10.0, 0.5, True, True)}
    assert measured_speeds(of_two(), ["H100"], same) == {}
    assert measured_speeds(of_two(), ["T4"], {"a": "another model"}) == {}


def test_what_an_earlier_run_did_not_get_to_measure_is_guessed() -> None:
    guess = Speed(130.0, 0.01, is_measured=False)
    (result,) = measured_speeds(of_two(per_work=0.0), ["T4"], {"a": "same"}).values()
    assert result.or_guess(guess) == Speed(10.0, 0.01, is_measured=False, is_startup_measured=True)
    (result,) = measured_speeds(of_two(startup=0.0), ["T4"], {"a": "same"}).values()
    assert result.or_guess(guess) == Speed(130.0, 0.5, is_measured=True, is_startup_measured=False)


@tries(60)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.floats(1e-6, 1e6), st.integers(0, 6))
def test_guesses_that_are_off_by_one_factor_are_put_right(
    guesses: list[float], factor: float, measured: int
) -> None:
    guessed = {str(index): guess for index, guess in enumerate(guesses)}
    truth = {name: guess * factor for name, guess in guessed.items()}
    rescaled = calibrated(guessed, dict(list(truth.items())[:measured]))
    assert rescaled == pytest.approx(truth if measured else guessed, rel=1e-9)


def test_calibration_by_hand() -> None:
    rescaled = calibrated({"a": 1.0, "b": 10.0, "c": 5.0, "d": 0.0}, {"a": 2.0, "b": 80.0})
    assert rescaled == {"a": 2.0, "b": 80.0, "c": pytest.approx(20.0), "d": None}, "the mean of 2 and 8 is 4"
    assert calibrated({"a": 0.0, "b": 3.0}, {"a": 2.0}) == {"a": 2.0, "b": 3.0}


def test_a_guess_counts_what_is_multiplied() -> None:
    """Half of the parameters are looked up."""

    def guess(embeddings: int, gpus: int = 0) -> Speed:
        weights = Weights(10**9, 4 * 10**9, 10**8, embeddings)
        needed = Footprint(weights, Activation(0.0), 0, 0, "float32", "none", "sdpa", 512)
        return guessed_speed(needed, gpus)

    whole, half = guess(0), guess(10**9 // 2)
    assert half.seconds_per_work == whole.seconds_per_work / 2 > 0
    assert half.startup_seconds == whole.startup_seconds, "all of it is read"
    assert guess(0, gpus=2).seconds_per_work < guess(0, gpus=1).seconds_per_work < whole.seconds_per_work
