package cli

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/why"
)

func newTest(flags connectorFlags) *cobra.Command {
	var r connector
	var endpoint string
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:   "test DESTINATION",
		Short: "Send a signed test event to a destination, and print the response",
		Long: `Sends one track call, "` + adminapi.TestEvent + `", to each endpoint of a destination, or to
--endpoint, and prints the response and the time. A dispatcher sends it with the
signatures, credentials, TLS settings and address checks of a delivery, also while
the circuit breaker of the endpoint is open.

It is no delivery: filters do not apply, ledgers and metrics do not count it, and a
failure is not retried. 'attempts' shows it as a test. A receiver recognizes it by its
event, and by its messageId, which begins with posthorn-test-. Ten tests a minute are
permitted for a destination. Exits 1 unless every endpoint accepted the event.`,
		Example: "  posthorn test crm\n  posthorn test crm --endpoint primary -o json",
		Args:    command.ExactArgs("DESTINATION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := destination(r, args[0])
			if err != nil {
				return err
			}
			targets, closeAll, err := r.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			list, err := sendTest(cmd, targets, name, endpoint)
			if err != nil {
				return err
			}
			return printTest(cmd.OutOrStdout(), objects, list)
		},
	}
	r = flags(cmd)
	cmd.ValidArgsFunction = completeDestination(func() connector { return r })
	command.ColorFlag(cmd)
	cmd.Flags().StringVar(&endpoint, "endpoint", "", "only this endpoint")
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// sendTest lets the first dispatcher that has the destination send the event.
func sendTest(cmd *cobra.Command, targets []target, destination, endpoint string) (list []adminapi.Attempt, err error) {
	for _, t := range targets {
		if list, err = t.Test(cmd.Context(), destination, endpoint); err == nil {
			return list, nil
		}
		status, ok := errors.AsType[*adminapi.StatusError](err)
		err = t.explain(err)
		if ok && status.StatusCode != http.StatusNotFound && status.StatusCode != http.StatusConflict {
			return nil, err
		}
	}
	if err := unknownEndpoint(cmd.Context(), targets, destination, endpoint); err != nil {
		return nil, err
	}
	return nil, err
}

// printTest prints the attempts, and fails if one failed.
func printTest(w io.Writer, objects *command.Objects, list []adminapi.Attempt) error {
	failed := false
	for _, a := range list {
		failed = failed || a.Reason != ""
		if objects.Chosen() {
			if err := objects.Print(w, a); err != nil {
				return err
			}
			continue
		}
		fmt.Fprintln(w, testLine(w, &a))
	}
	if failed {
		return command.ErrFailed
	}
	return nil
}

// testLine is the result at one endpoint, with the response and the fix of a failure.
func testLine(w io.Writer, a *adminapi.Attempt) string {
	verdict := command.Paint(w, command.Green, "accepted")
	if a.Reason != "" {
		verdict = command.Paint(w, command.Red, "failed")
	}
	result := strings.TrimSuffix(strings.TrimSpace(a.Reason+" "+status(a.StatusCode)), " -")
	text := fmt.Sprintf("%s %s: %s: %s after %s", a.Destination, a.Endpoint, verdict, result, a.Duration.Round(100*time.Microsecond))
	if a.RemoteAddr != "" {
		text += " from " + a.RemoteAddr
	}
	text += ", messageId " + quoted(string(a.MessageID))
	if a.Message != "" {
		text += "\n  " + sentence(a.Message)
	}
	if a.Response != "" {
		text += fmt.Sprintf("\n  Response: %q", a.Response)
	}
	if fix := why.AttemptFix(a.Reason, a.StatusCode); fix != "" {
		text += "\n  To do: " + sentence(fix)
	}
	return text
}
