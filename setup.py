"""Ships the templates of ``rollart new-env`` in the wheel; pyproject.toml says all else.

They lie in cookiecutter/, which is a folder and no package, so no setting of setuptools finds them.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TEMPLATES = "cookiecutter"


class BuildWithTemplates(build_py):
    """Copies the templates beside the module that reads them; an editable install reads ours."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "rollart_plugins", TEMPLATES)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(TEMPLATES, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithTemplates})
