"""``deploy/prometheus`` as promtool sees it, each alert's threshold and waiting time pinned by a unit test."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: alert rules are not tested")

MUTATIONS = [
    ('up{job="octavo"} == 0', 'up{job="other"} == 0'),
    ('up{job="octavo"} == 0\n        for: 1m', 'up{job="octavo"} == 0\n        for: 2m'),
    (" unless on (job, instance) vllm:num_requests_running", ""),
    ("for: 15m", "for: 5m"),
    ("kv_cache_usage_perc > 0.9", "kv_cache_usage_perc >= 0.9"),
    ("kv_cache_usage_perc > 0.9", "kv_cache_usage_perc > 0.95"),
    ("num_requests_waiting > 10", "num_requests_waiting > 9"),
    ("num_requests_waiting > 10", "num_requests_waiting > 11"),
    ("[5m]))) > 2\n", "[5m]))) > 1\n"),
    ("[5m]))) > 2\n", "[5m]))) > 2.2\n"),
    ("[5m]))) > 30", "[5m]))) > 29"),
    ("[5m]))) > 30", "[5m]))) > 32"),
    ("(0.95,", "(0.5,"),
    ("le) (rate(vllm:time_to_first", "le, instance) (rate(vllm:time_to_first"),
    ("humanizePercentage", "humanize"),
    ("admission_rejections_total[5m])) > 0", "admission_rejections_total[5m])) > 5"),
    ("octavo:step_failures_total[10m]) > 0", "octavo:step_failures_total[10m]) < 0"),
    ("increase(octavo:compiles_after_ready_total[10m]) > 0", "octavo:compiles_after_ready_total > 0"),
]


def promtool(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *command], cwd=cwd, capture_output=True, text=True, timeout=30)


def test_configuration_and_rules():
    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts.test.yml")):
        result = promtool(*command, cwd=FOLDER)
        assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested():
    alerts = set(re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yml").read_text()))
    fired = set(re.findall(r'alertname="(\w+)", (?:instance|model_name)=', (FOLDER / "alerts.test.yml").read_text()))
    assert alerts == fired
    assert len(alerts) >= 5


@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_another_rule_fails(number, tmp_path):
    old, new = MUTATIONS[number]
    text = (FOLDER / "alerts.yml").read_text()
    assert old in text
    (tmp_path / "alerts.yml").write_text(text.replace(old, new))
    shutil.copy(FOLDER / "alerts.test.yml", tmp_path)
    result = promtool("test", "rules", "alerts.test.yml", cwd=tmp_path)
    assert result.returncode != 0
    assert "FAILED" in result.stdout + result.stderr
