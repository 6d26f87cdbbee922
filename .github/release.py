"""Prepares a checkout for the package index: python .github/release.py TAG ADDRESS

ADDRESS is that of the repository, such as https://github.com/OWNER/NAME. The tag must be "v" and the version of
pyproject.toml. An index shows the README without the files that it links to. Therefore the script writes a copy,
.github/README.md, whose links lead to the repository at this tag. pyproject.toml then names the copy and the addresses.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = (".png", ".svg")


def with_addresses(page: str, tag: str, address: str) -> str:
    """Return a page of Markdown at the root of the repository, with absolute links in place of its relative ones."""

    def absolute(link: re.Match[str]) -> str:
        path = link[1]
        if "://" in path or path.startswith("#"):
            return link[0]
        kind = "raw" if path.endswith(PICTURES) else "tree" if (ROOT / path.partition("#")[0]).is_dir() else "blob"
        return f"]({address}/{kind}/{tag}/{path})"

    return re.sub(r"\]\(([^)\s]+)\)", absolute, page)


def project_with_addresses(project: str, tag: str, address: str) -> str:
    """Return pyproject.toml with the copy of the README and with project.urls. Raises ValueError for other tags."""
    version = tomllib.loads(project)["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag must be v{version}, for the version of pyproject.toml, got {tag}")
    urls = {
        "Source": address,
        "Documentation": f"{address}/blob/{tag}/docs/tutorial.md",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    changed = project.partition("\n[project.urls]\n")[0]  # a source distribution is changed already
    changed = changed.replace('\nreadme = "README.md"\n', '\nreadme = ".github/README.md"\n')
    return f"{changed}\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())


def main() -> None:
    """Change the files of this checkout."""
    tag, address = sys.argv[1:]
    project = ROOT / "pyproject.toml"
    project.write_text(project_with_addresses(project.read_text(), tag, address))
    (ROOT / ".github/README.md").write_text(with_addresses((ROOT / "README.md").read_text(), tag, address))


if __name__ == "__main__":
    main()
