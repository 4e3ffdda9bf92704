"""mkdocs hook: pages of the site that are files of the repository's root, with links to suit."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = (root / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for linked, its_page in PAGES.items():
            text = text.replace(f"]({linked}", f"]({its_page}")
        text = re.sub(r"\[([^\]]*)\]\((?:LICENSE|benchmarks/README\.md)\)", r"\1", text)  # not on the site
        files.append(File.generated(config, page, content=text))
    return files
