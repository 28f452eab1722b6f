import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Flower sets these in the processes that run an app; messages carry them."""
    for name, value in (("_run_id", 77), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
