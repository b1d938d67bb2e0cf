package cli

import (
	"context"
	"crypto/hmac"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/internal/plural"
)

func newTail(flags connectorFlags) *cobra.Command {
	var r connector
	var o tail
	var secretFile string
	var all bool
	cmd := &cobra.Command{
		Use:   "tail [DESTINATION]",
		Short: "Follow delivery attempts, or send them on to a receiver",
		Long: `Prints delivery attempts as they end.

--forward-to sends the body of each attempt on to a receiver that you develop, one after
the other, retries included. Only the body, Content-Type and Idempotency-Key are those
of the delivery: its signatures and configured headers are not sent on. With --secret-value
the request has an X-Signature under this secret. The deliveries do not wait for
the receiver: if it is slower, attempts are missed, and their number is printed.

--bodies and --forward-to read message bodies. In a cluster they need the Role
posthorn-bodies-user. The dispatcher's log names the reader.`,
		Example: `  posthorn tail -A
  posthorn tail crm --failed -o json
  posthorn tail crm --forward-to http://localhost:3000/hook --secret-value "$TEST_SECRET"`,
		Args: command.AtMostArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if err := checkForwardTo(o.forwardTo); err != nil {
				return err
			}
			if o.secret, err = secretFrom(o.secret, secretFile); err != nil {
				return err
			}
			if o.secret != "" && o.forwardTo == "" {
				return command.Usagef("--secret-value signs the requests of --forward-to; set both")
			}
			if err := command.CheckAllNamespaces(cmd, all, strings.Join(args, " ")); err != nil {
				return err
			}
			if len(args) == 1 {
				o.destination, err = destination(r, args[0])
			} else if !all {
				o.namespace, err = r.namespace()
			}
			if err != nil {
				return err
			}
			targets, closeAll, err := r.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			if err := unknownEndpoint(cmd.Context(), targets, o.destination, o.endpoint); err != nil {
				return err
			}
			return o.run(cmd, targets)
		},
	}
	r = flags(cmd)
	cmd.ValidArgsFunction = completeDestination(func() connector { return r })
	command.AllNamespacesFlag(cmd, &all)
	f := cmd.Flags()
	f.StringVar(&o.endpoint, "endpoint", "", "only this endpoint")
	f.BoolVar(&o.failed, "failed", false, "only failed attempts")
	f.BoolVar(&o.bodies, "bodies", false, "print the body of each attempt, too")
	f.StringVar(&o.forwardTo, "forward-to", "", "send the body of each attempt on to this URL")
	f.StringVar(&o.secret, "secret-value", "", "with --forward-to: sign the requests with this secret")
	f.StringVar(&secretFile, "secret-file", "", "a file that holds the secret, byte for byte")
	o.objects = command.ObjectsFlag(cmd)
	return cmd
}

// tail follows the attempts of all dispatchers.
type tail struct {
	// namespace is empty for all, and with a destination.
	namespace             string
	destination, endpoint string
	objects               *command.Objects
	failed, bodies        bool
	// forwardTo is the URL of a receiver, secret signs the requests to it; "" is none.
	forwardTo, secret string

	sent, refused, missed int64
}

// tailLine is the JSON of an attempt.
type tailLine struct {
	adminapi.AttemptWithBody
	// ForwardStatus is the receiver's answer to --forward-to, ForwardError why there is none.
	ForwardStatus int    `json:"forwardStatus,omitempty"`
	ForwardError  string `json:"forwardError,omitempty"`
}

func (o *tail) run(cmd *cobra.Command, targets []target) error {
	if o.forwardTo == "" && !o.objects.Chosen() {
		fmt.Fprintln(cmd.ErrOrStderr(), strings.ReplaceAll(attemptHeader, "\t", "  "))
	}
	attempts := make(chan adminapi.AttemptWithBody)
	group, ctx := errgroup.WithContext(cmd.Context())
	for _, t := range targets {
		group.Go(func() error { return o.follow(ctx, cmd.ErrOrStderr(), t, attempts) })
	}
	go func() { _ = group.Wait(); close(attempts) }()
	if o.forwardTo != "" && !o.objects.Chosen() {
		fmt.Fprintf(cmd.ErrOrStderr(), "sending the attempts on to %s; stop with Ctrl-C\n", o.forwardTo)
	}
	for a := range attempts {
		if a.Missed > 0 {
			o.missed += a.Missed
			fmt.Fprintf(cmd.ErrOrStderr(), "%s missed: this command is slower than the deliveries\n", plural.Count(a.Missed, "attempt"))
		}
		if o.failed && a.Reason == "" || o.namespace != "" && !strings.HasPrefix(a.Destination, o.namespace+"/") {
			continue
		}
		if err := o.print(cmd.Context(), cmd.OutOrStdout(), a); err != nil {
			return err
		}
	}
	if o.forwardTo != "" && !o.objects.Chosen() {
		fmt.Fprintf(cmd.ErrOrStderr(), "%d sent on, %d of them not accepted; %d missed\n", o.sent, o.refused, o.missed)
	}
	if cmd.Context().Err() != nil {
		return nil // Ctrl-C is the usual end.
	}
	return group.Wait()
}

// follow forwards the attempts of one dispatcher as they end. If the user may not read bodies, but
// did not only want them, it forwards the attempts without.
func (o *tail) follow(ctx context.Context, stderr io.Writer, t target, attempts chan<- adminapi.AttemptWithBody) error {
	stream := t.Tail(ctx, o.destination, o.endpoint)
	if o.bodies || o.forwardTo != "" {
		plain := stream
		stream = func(yield func(adminapi.AttemptWithBody, error) bool) {
			for a, err := range t.TailWithBodies(ctx, o.destination, o.endpoint) {
				if forbidden(err) && o.forwardTo == "" {
					fmt.Fprintf(stderr, "The bodies are not shown. %v\n", t.explain(err))
					plain(yield)
					return
				}
				if !yield(a, err) {
					return
				}
			}
		}
	}
	for a, err := range stream {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the dispatcher stopped; run the command again to follow its successor")
		}
		if err != nil {
			return t.explain(err)
		}
		select {
		case attempts <- a:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// print sends an attempt on, if it shall be, and prints it.
func (o *tail) print(ctx context.Context, out io.Writer, a adminapi.AttemptWithBody) error {
	line := tailLine{AttemptWithBody: a}
	if o.forwardTo != "" {
		var err error
		if line.ForwardStatus, err = o.forward(ctx, a); ctx.Err() != nil {
			return nil
		}
		if err != nil {
			line.ForwardStatus, line.ForwardError = 0, err.Error()
		}
		if o.sent++; err != nil || line.ForwardStatus >= http.StatusMultipleChoices {
			o.refused++
		}
	}
	if !o.bodies {
		line.Body = nil
	}
	if o.objects.Chosen() {
		return o.objects.Print(out, line)
	}
	text := strings.ReplaceAll(attemptLine(a.Attempt), "\t", "  ")
	switch {
	case line.ForwardError != "":
		text = forwardedLine(a.Attempt) + "not sent on: " + line.ForwardError
	case o.forwardTo != "":
		text = forwardedLine(a.Attempt) + fmt.Sprint(line.ForwardStatus)
	}
	if len(line.Body) > 0 {
		text += "\n    " + string(line.Body)
	}
	_, err := fmt.Fprintln(out, text)
	return err
}

// forwardedLine begins the line of an attempt that is sent on.
func forwardedLine(a adminapi.Attempt) string {
	result := strings.TrimSuffix(strings.TrimSpace(a.Reason+" "+status(a.StatusCode)), " -")
	return fmt.Sprintf("%s  %s  %s  %s  attempt %d: %s  -> ", a.Time.Local().Format("15:04:05.000"), a.Destination, a.Endpoint,
		quoted(string(a.MessageID)), a.Number, result)
}

// forward sends the body of an attempt to the receiver.
func (o *tail) forward(ctx context.Context, a adminapi.AttemptWithBody) (int, error) {
	h := http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {a.MessageID.Key()}}
	if o.secret != "" {
		mac := hmac.New(sha1.New, []byte(o.secret))
		mac.Write(a.Body)
		h.Set("X-Signature", hex.EncodeToString(mac.Sum(nil)))
	}
	return sendOn(ctx, o.forwardTo, h, a.Body)
}

// forwardTimeout is the timeout of a delivery by default.
const forwardTimeout = 5 * time.Second
