package cli

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// An interrupt ends the wait, not the request, and the error names the command that shows it.
func TestInterruptedDeletionContinues(t *testing.T) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"metadata":{"name":"delete-1"},"status":{}}`)
		time.AfterFunc(50*time.Millisecond, stop) // The response has arrived, or the request fails with the same result.
	}))
	t.Cleanup(server.Close)
	cmd := &cobra.Command{}
	cmd.SetContext(ctx)
	err := (&direct{admin: server.URL}).awaitDeletion(cmd, "default", "delete-1", time.Hour)
	if want := "the request delete-1 continues; see 'posthorn get deletions delete-1'"; err == nil || err.Error() != want {
		t.Errorf("error: got %v, want %s", err, want)
	}
}
