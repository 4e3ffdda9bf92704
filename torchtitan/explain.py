"""Prints which layers a run would convert to low precision, and why, without training.

python -m torchtitan.explain [--json out.json] --job.config_file=FILE.toml --section.key=value ...
"""

from torchtitan.config import ConfigManager
from torchtitan.errors import ConfigError, command_parser, run_command
from torchtitan.files import local_path


def main() -> None:
    parser = command_parser("explain", __doc__)
    parser.add_argument(
        "--json", type=local_path, help="JSON file to write the report to, as a list of objects", metavar="FILE"
    )
    arguments, flags = parser.parse_known_args()
    try:
        config = ConfigManager().parse_args(flags)
        from torchtitan.converters.conversion_report import phases_to_json, summary, to_json, to_table
        from torchtitan.engine.conversion import explain_conversion
        from torchtitan.engine.model_args import register_models
        from torchtitan.engine.stages import parse_stages

        register_models(config)
        reports = []
        stages = parse_stages(config)
        for stage in stages:
            with stage.named_in_errors():
                report = explain_conversion(stage.config)
            reports.append((None if stage is stages[-1] else stage.last_step, report))
            if stage.title:
                print(f"{stage.title}, to step {stage.last_step}")
            print(f"{to_table(report)}\n{summary(report)}" if report else "no converters")
        if arguments.json:
            text = to_json(reports[0][1]) if len(reports) == 1 else phases_to_json(reports)
            arguments.json.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {arguments.json} cannot be written ({error.strerror}).") from None


if __name__ == "__main__":
    run_command(main)
