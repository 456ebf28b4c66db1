"""The same scripts with torch.distributed and with devicemesh.distributed."""

import numpy as np
import pytest
from torch_scripts import SCRIPTS, run_script

pytest.importorskip("torch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_results_are_torchs(name):
    expected = run_script(name, 3, "torch.distributed")
    for arrays in ("torch", "numpy"):
        result = run_script(name, 3, "devicemesh.distributed", arrays)
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(result[key], value, rtol=1e-12)
