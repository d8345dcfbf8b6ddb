import resource
import time

from ratelimitd.observe import metrics


def test_resident_memory_is_that_of_a_running_interpreter():
    assert 5_000_000 < metrics.resident_bytes() < 10_000_000_000


def test_resident_memory_is_the_second_figure_of_statm_in_pages(tmp_path):
    statm = tmp_path / "statm"
    statm.write_bytes(b"900 3 2 1 0 5 0\n")
    assert metrics.resident_bytes(statm) == 3 * resource.getpagesize()


def test_without_proc_the_peak_is_reported(tmp_path):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * metrics._MAXRSS_UNIT
    assert metrics.resident_bytes(tmp_path / "absent") >= peak
    broken = tmp_path / "statm"
    broken.write_bytes(b"1\n")
    assert metrics.resident_bytes(broken) >= peak


def test_the_start_of_the_process_lies_in_the_past():
    assert 0 < metrics.STARTED_AT_S <= time.time()
