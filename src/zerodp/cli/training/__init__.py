"""What `zerodp train` is made of: text, model, loop, panel and report. The command itself is `zerodp.cli.train`."""
