"""A hook of mkdocs: pages of `benchmarks/` belong to the site, and links to other files of the project name them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_BENCHMARK = re.compile(r"\]\((?:\.\./)+benchmarks/")
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!benchmarks/|\w+\.md)[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """The measured tables, beside the pages that name them."""
    for path in sorted((ROOT / "benchmarks").glob("*")):
        if path.suffix in (".md", ".svg"):
            files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the script that searches without a server from the site: the plugin would fetch it (iframe-worker, MIT)."""
    here = "../" * page.file.dest_uri.count("/") + "web/iframe-worker.min.js"
    return output.replace("https://unpkg.com/iframe-worker/shim", here)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that lead out of the folder of pages lead into the site, or become names; the first page has a title."""
    if page.is_homepage:
        page.meta.setdefault("title", config.site_description)
    up = "../" * page.file.src_uri.count("/")
    inside = _BENCHMARK.sub(f"]({up}benchmarks/", markdown)
    return _ELSEWHERE.sub(r"\1", inside) if page.file.src_uri.startswith(("design/", "benchmarks/")) else inside
