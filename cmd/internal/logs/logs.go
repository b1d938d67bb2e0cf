// Package logs makes the loggers of the servers: level and format by flags, and a limit for storms of
// one message.
package logs

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/internal/termsafe"
)

// Flags are the log flags of every server.
type Flags struct{ level, format string }

// Register adds the flags to a command.
func (l *Flags) Register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&l.level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&l.format, "log-format", "text", "text or json")
}

// Logger makes the logger that the flags select. Its errors name a flag.
func (l *Flags) Logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, fmt.Errorf("--log-level %q: use debug, info, warn or error", l.level)
	}
	o := &slog.HandlerOptions{Level: level, ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == "err" && len(groups) == 0 { // logr uses this key.
			a.Key = "error"
		}
		return a
	}}
	switch l.format {
	case "text":
		return slog.New(newSampler(slog.NewTextHandler(w, o))), nil
	case "json":
		return slog.New(newSampler(slog.NewJSONHandler(termsafe.NewWriter(w), o))), nil
	}
	return nil, fmt.Errorf("--log-format %q: use text or json", l.format)
}
