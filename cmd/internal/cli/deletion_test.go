package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// An interrupt ends the wait, not the request, and the error names the command that shows it.
func TestInterruptedDeletionContinues(t *testing.T) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"metadata":{"name":"delete-1"},"status":{}}`)
		time.AfterFunc(50*time.Millisecond, stop) // The response has arrived, or the request fails with the same result.
	}))
	t.Cleanup(server.Close)
	cmd := &cobra.Command{}
	cmd.SetContext(ctx)
	err := (&direct{admin: server.URL}).awaitDeletion(cmd, &command.Objects{}, "default", "delete-1", time.Hour)
	if want := "the request delete-1 continues; see 'posthorn get deletions delete-1'"; err == nil || err.Error() != want {
		t.Errorf("error: got %v, want %s", err, want)
	}
}

// A command that an interrupt ends has the exit code of the shell, and prints its error once.
func TestExitCodeOfAnInterrupt(t *testing.T) {
	for want, err := range map[string]error{"": command.Interrupted(command.ErrFailed),
		"posthorn: the request continues\n": command.Interrupted(errors.New("the request continues"))} {
		var stderr bytes.Buffer
		code := command.Run(&cobra.Command{RunE: func(*cobra.Command, []string) error { return err }}, nil, nil, io.Discard, &stderr)
		if code != command.ExitInterrupted || stderr.String() != want {
			t.Errorf("got exit code %d and %q, want %d and %q", code, stderr.String(), command.ExitInterrupted, want)
		}
	}
}
