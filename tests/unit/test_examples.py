"""The examples in docstrings run, and everything public says how it is called."""

import doctest
import inspect

import pytest

import devicemesh


def public_objects():
    """(name, object) of all public functions, classes and their public methods."""
    for name in devicemesh.__all__:
        value = getattr(devicemesh, name)
        if name.startswith("_") or not callable(value):
            continue
        yield name, value
        if not inspect.isclass(value) or issubclass(value, BaseException):
            continue
        for attribute in vars(value):
            if not attribute.startswith("_"):
                yield f"{name}.{attribute}", inspect.unwrap(getattr(value, attribute))


OBJECTS = dict(public_objects())


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    devicemesh.close_world()
    yield
    devicemesh.close_world()


@pytest.mark.parametrize(
    "name", [name for name in OBJECTS if ">>>" in (OBJECTS[name].__doc__ or "")]
)
def test_example_runs(name):
    test = doctest.DocTestParser().get_doctest(OBJECTS[name].__doc__, {}, name, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    output = []
    runner.run(test, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


@pytest.mark.parametrize("name", OBJECTS)
def test_has_a_docstring(name):
    value = OBJECTS[name]
    if isinstance(value, str) or inspect.ismemberdescriptor(value):
        pytest.skip("a plain value")
    assert value.__doc__


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in OBJECTS.items()
        if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception))
    ],
)
def test_has_a_signature(name):
    if name in ("ProcessGroup", "Work"):
        pytest.skip("cannot be made by callers")
    inspect.signature(OBJECTS[name])
