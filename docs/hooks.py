"""Hooks of the documentation's build: links into the repository, pages of its root, the generated reference.

mkdocs calls `on_files`, then `on_page_markdown` and `on_post_page` for each page.

A page links to a file of the repository by its relative path, such as `../experiments/loader_cpu/results.csv`, so the
link also works where the repository itself is browsed. The build copies every file that a page links to into the site,
under its path in the repository, and rewrites the link. A Markdown file that is linked becomes a page of the site.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

__all__ = ["commands", "names", "on_files", "on_page_markdown", "on_post_page", "stage_pictures", "yaml_keys"]

ROOT = Path(__file__).parents[1]
DOCS = "docs"
ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
"""Pages of the repository's root that the navigation names; README.md is the site's first page."""

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
_MARKER = re.compile(r"^<!-- generate: (\w+)(?: ([\w.]+))? -->$", flags=re.MULTILINE)
_LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\s(?:src|href)=["']?(?:https?:)?//[^>]*>""")


# --- files ------------------------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, the pictures of the stages, and every file that a page links to, those of
    linked pages included."""
    for stage, path in stage_pictures().items():
        files.append(File.generated(config, path, content=pictures_module().picture(stage)))
    for name in ROOT_PAGES:
        files.append(_repository_file(name, config, InclusionLevel.INCLUDED))
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for path in _linked_files(_path_in_repository(page), page.content_string):
            uri = _site_uri(path)
            if files.get_file_from_path(uri) is None:
                linked = _repository_file(path, config, InclusionLevel.NOT_IN_NAV)
                files.append(linked)
                if uri.endswith(".md"):
                    waiting.append(linked)
    return files


def _repository_file(path: str, config: MkDocsConfig, inclusion: InclusionLevel) -> File:
    return File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=inclusion)


def _path_in_repository(file: File) -> str:
    return file.src_uri if file.generated_by else f"{DOCS}/{file.src_uri}"


def _site_uri(path: str) -> str:
    """Where a file of the repository stands in the site: files of docs/ at the top, all others under their path."""
    return path.removeprefix(f"{DOCS}/")


def _target(page: str, link: str) -> str | None:
    """The path in the repository of the file that a page's link names; None if there is no such file."""
    if ":" in link:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path / "README.md").is_file():
        path = posixpath.join(path, "README.md")
    return path if (ROOT / path).is_file() else None


def _linked_files(page: str, text: str) -> Iterator[str]:
    for match in _LINK.finditer(text):
        if (path := _target(page, match[2])) is not None:
            yield path


# --- pages ------------------------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links into the repository, then replace each `<!-- generate: ... -->` by what it names.

    The search leaves out the changelog and the experiments: they repeat the words of the guides.
    """
    path = _path_in_repository(page.file)
    if path == "CHANGELOG.md" or path.startswith("experiments/"):
        page.meta["search"] = {"exclude": True}

    def link(match: re.Match[str]) -> str:
        text, linked, anchor = match[1], match[2], match[3] or ""
        if (target := _target(path, linked)) is not None:
            uri = posixpath.relpath(_site_uri(target), posixpath.dirname(page.file.src_uri) or ".")
            return f"[{text}]({uri}{anchor})"
        directory = posixpath.normpath(posixpath.join(posixpath.dirname(path), linked))
        return text if ":" not in linked and (ROOT / directory).is_dir() else match[0]

    def generated(match: re.Match[str]) -> str:
        if match[1] not in _GENERATORS:
            raise BuildError(f"{path}: {match[0]} must name one of {', '.join(_GENERATORS)}")
        return _GENERATORS[match[1]](*([match[2]] if match[2] else []))

    return _MARKER.sub(generated, _LINK.sub(link, markdown))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Fail the build if a page would load something from the network."""
    if (found := _LOADED.search(output)) is not None:
        raise BuildError(f"{page.file.src_uri} loads from the network: {found[0]}; ship the file instead")
    return output


# --- the generated reference ------------------------------------------------------------------------------------------


def names(module: str) -> str:
    """A section for each name that a module offers, which mkdocstrings fills from the docstrings."""
    return "\n\n".join(f"::: {module}.{name}" for name in importlib.import_module(module).__all__)


def commands() -> str:
    """A section for each command: its help, how it is called, its arguments and options."""
    import typer

    from gpuflow.cli import app

    group: Any = typer.main.get_command(app)
    sections = []
    for name, command in group.commands.items():
        context = command.make_context(f"gpuflow {name}", [], resilient_parsing=True)
        parameters = command.get_params(context)
        arguments = [
            parameter.metavar if parameter.required or parameter.metavar.startswith("[") else f"[{parameter.metavar}]"
            for parameter in parameters
            if parameter.param_type_name == "argument"
        ]
        call = " ".join(["gpuflow", name, "[OPTIONS]", *arguments])
        rows = [tuple(parameter.get_help_record(context)) for parameter in parameters]
        sections += [f"### gpuflow {name}", _paragraphs(command.help), f"```text\n{call}\n```", command.epilog]
        sections.append(
            _table(("argument or option", "meaning"), [(_code(shown), _text(text)) for shown, text in rows])
        )
    return "\n\n".join(sections)


def pictures_module() -> ModuleType:
    """Return stage_pictures.py, which no package holds."""
    spec = importlib.util.spec_from_file_location("stage_pictures", ROOT / DOCS / "stage_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stage_pictures() -> dict[str, str]:
    """Return the path in the site of each stage's picture, by the stages that have one."""
    return {stage: f"pictures/stages/{stage}.jpg" for stage in pictures_module().pictured()}


Schema = dict[str, Any]
_OWN_SECTIONS = ("train", "serve", "run")
"""Blocks that the page shows in sections of their own."""
_STAGE = "stage."
"""Stages are definitions of the schema: `stage.resize`."""


def yaml_keys(section: str = "") -> str:
    """A table of keys for a block of the YAML file and each block within it; without a name, for the blocks without a
    section of their own, then one of parameters for each stage, with its picture."""
    from gpuflow.config.schema import json_schema
    from gpuflow.stages import STAGES

    schema = json_schema(STAGES)
    places = (section,) if section else tuple(name for name in schema["properties"] if name not in _OWN_SECTIONS)
    blocks = [(place, block) for place, block in _blocks(schema, schema, "") if place.split(".")[0] in places]
    parts = list(
        dict.fromkeys(_section(schema, place, block) for place, block in blocks)
    )  # kinds of sources share some
    if not section:
        pictures = stage_pictures()
        for name in STAGES:
            picture = _picture(name, pictures[name]) if name in pictures else ""
            parts.append(_section(schema, f"- {name}", schema["$defs"][f"{_STAGE}{name}"], picture))
    return "\n\n".join(parts)


def _section(document: Schema, place: str, block: Schema, picture: str = "") -> str:
    described = _paragraphs(block.get("description", ""))
    kind = ", ".join(block.get("required", ())) if place == "source" else ""
    heading = f"### `{place}: {{{kind}: ...}}`" if kind else f"### `{place}`"
    return "\n\n".join(part for part in (heading, described, picture, _keys(document, block)) if part)


def _picture(stage: str, path: str) -> str:
    """A stage's picture, and below it what its squares show."""
    shown = ["the photograph", *pictures_module().captions(stage)]
    return f"![{stage}: {'; '.join(shown)}](../{path})\n\n{_text(' | '.join(shown))}"


def _blocks(document: Schema, block: Schema, place: str) -> Iterator[tuple[str, Schema]]:
    """(dotted place, schema) of a block of keys and of all blocks within it."""
    if place:
        yield place, block
    for name, value in block["properties"].items():
        inside = f"{place}.{name}".lstrip(".")
        for part in _alternatives(document, value):
            if "properties" in part:
                yield from _blocks(document, part, inside)
            elif isinstance(part.get("additionalProperties"), dict):
                for each in _alternatives(document, part["additionalProperties"]):
                    if "properties" in each:
                        yield from _blocks(document, each, f"{inside}.NAME")


def _keys(document: Schema, block: Schema) -> str:
    """A table of the block's keys: type, default, and the meaning where the schema has one."""
    required, rows = block.get("required", ()), []
    for name, value in block["properties"].items():
        default = "required" if name in required else _default(value)
        meaning = value.get("description") or _resolved(document, value).get("description", "")
        rows.append((_code(name), _types(document, value), default, _text(meaning)))
    if all(not row[-1] for row in rows):
        return _table(("key", "type", "default"), [row[:-1] for row in rows])
    return _table(("key", "type", "default", "meaning"), rows)


def _types(document: Schema, value: Schema) -> str:
    if value.get("$ref", "").endswith("/stages"):
        return "list of [stages](#stages)"
    return " or ".join(_type(document, part) for part in _alternatives(document, value))


def _alternatives(document: Schema, value: Schema) -> list[Schema]:
    """What a value may be, null left out."""
    value = _resolved(document, value)
    several = [] if "properties" in value else value.get("anyOf") or value.get("oneOf")  # those of a block are rules
    parts = [_resolved(document, part) for part in several or [value]]
    return [part for part in parts if part.get("type") != "null"]


def _resolved(document: Schema, value: Schema) -> Schema:
    reference = value.get("$ref")
    return value if reference is None else _resolved(document, document["$defs"][reference.rpartition("/")[2]])


def _type(document: Schema, value: Schema) -> str:
    """A schema in words: `integer >= 1`."""
    if "const" in value or "enum" in value:
        return ", ".join(_code(json.dumps(word).strip('"')) for word in value.get("enum", [value.get("const")]))
    kind = value.get("type", "any value")
    if kind == "object":
        each = value.get("additionalProperties")
        return f"mapping of names, each {_types(document, each)}" if isinstance(each, dict) else "block of keys"
    if kind == "array" and "prefixItems" in value:
        each = dict.fromkeys(_types(document, part) for part in value["prefixItems"])
        return f"list of {len(value['prefixItems'])}, each {' or '.join(each)}"
    if kind == "array":
        return f"list, each {_types(document, value.get('items', {}))}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "&lt;=", "exclusiveMaximum": "&lt;"}
    limits = [f"{sign} {value[key]:g}" for key, sign in signs.items() if key in value]
    return f"{kind} {' and '.join(limits)}".rstrip()


def _default(value: Schema) -> str:
    default = value.get("default")
    if isinstance(default, dict):  # a block: the keys that it sets
        given = {key: each for key, each in default.items() if each is not None}
        return _code(json.dumps(given).replace('"', "")) if given else ""
    return "" if default is None else _code(json.dumps(default).strip('"'))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


def _text(text: str) -> str:
    """Plain text on one line of Markdown, within a table too; code between backticks stays as it is."""
    words = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("[", "\\[") for part in words)


def _paragraphs(text: str) -> str:
    return "\n\n".join(_text(paragraph) for paragraph in re.split(r"\n\s*\n", text))


_GENERATORS: dict[str, Callable[..., str]] = {"names": names, "commands": commands, "keys": yaml_keys}
