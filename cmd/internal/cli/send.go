package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/cmd/internal/command"
)

func newSend(flags senderFlags) *cobra.Command {
	var c sender
	var raw string
	var fields = map[string]*string{}
	var props []string
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:   "send TYPE",
		Short: "Send one call",
		Long: `Sends one call to a running Posthorn and prints the response. TYPE is identify,
track, page, screen, group, alias, or batch (with --json).

Set traits (identify, group) and properties (track, page, screen) with
-p NAME=VALUE: a value that is JSON is sent as such, anything else as a string.
Exits 1 if the call, or a call of a batch, was rejected.`,
		Example: `  posthorn send track --write-key demo --user-id u1 --event "Order Completed" -p total=99.5
  posthorn send identify --write-key demo --user-id u1 -p email=a@example.com -p plan=pro
  posthorn send alias --write-key demo --user-id u1 --previous-id anon-7
  posthorn send track --write-key demo --json '{"userId":"u1","event":"Signed Up"}'
  posthorn send batch --write-key demo --json @batch.json`,
		ValidArgs: []string{"identify", "track", "page", "screen", "group", "alias", "batch"},
		Args:      command.ExactArgs("TYPE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, ok := propertiesOf[args[0]]
			if !ok {
				return command.Usagef("type %q is not one of identify, track, page, screen, group, alias, batch", args[0])
			}
			body, err := command.ReadJSON("json", raw, cmd.InOrStdin(), "send several calls with 'posthorn import'")
			if err != nil {
				return err
			}
			for flag, types := range typesOf {
				if cmd.Flags().Changed(flag) && !slices.Contains(types, args[0]) {
					return command.Usagef("--%s is not for %s; it is for %s", flag, args[0], strings.Join(types, " and "))
				}
			}
			if raw == "" {
				if body, err = newCall(fields, key, props); err != nil {
					return err
				}
			}
			to, stop, err := c.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer stop()
			req, err := to.request(cmd.Context(), http.MethodPost, "/v1/"+args[0], bytes.NewReader(body))
			if err != nil {
				return err
			}
			req.Header.Set("Content-Type", "application/json")
			client := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: to.tls}}
			resp, err := client.Do(req)
			if err != nil {
				return to.explain(err)
			}
			defer resp.Body.Close()
			answer, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
			if err != nil {
				return err
			}
			var sent struct {
				MessageID event.ID `json:"messageId"`
			}
			_ = json.Unmarshal(body, &sent) // A batch has no messageId.
			if objects.Chosen() {
				if err := objects.Print(cmd.OutOrStdout(), newSendResult(resp.StatusCode, answer, sent.MessageID)); err != nil {
					return err
				}
			} else {
				fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", resp.Status, bytes.TrimSpace(answer))
				if resp.StatusCode == http.StatusOK && sent.MessageID != "" {
					fmt.Fprintf(cmd.OutOrStdout(), "messageId %s; '%s trace' shows where it is\n", sent.MessageID, cmd.Parent().CommandPath())
				}
			}
			if resp.StatusCode != http.StatusOK || bytes.Contains(answer, []byte(`"rejected"`)) {
				return command.ErrFailed
			}
			return nil
		},
	}
	c = flags(cmd)
	f := cmd.Flags()
	objects = command.ObjectsFlag(cmd)
	f.StringVar(&raw, "json", "", "the call as JSON, @FILE, or @- for standard input; sent unchanged")
	f.StringArrayVarP(&props, "prop", "p", nil, "NAME=VALUE, a trait or property; may be repeated")
	for flag, field := range map[string][2]string{
		"user-id": {"userId", "the user's id"}, "anonymous-id": {"anonymousId", "the anonymous id"},
		"event": {"event", "the event's name (track)"},
		"name":  {"name", "the page's or screen's name (page, screen)"}, "group-id": {"groupId", "the group's id (group)"},
		"previous-id": {"previousId", "the previous id (alias)"},
	} {
		fields[field[0]] = f.String(flag, "", field[1])
	}
	return cmd
}

// sendResult is the output of send.
type sendResult struct {
	StatusCode int      `json:"statusCode"`
	MessageID  event.ID `json:"messageId,omitempty"`
	// Response is the body of the response: JSON, or a text.
	Response json.RawMessage `json:"response"`
}

func newSendResult(statusCode int, response []byte, id event.ID) sendResult {
	if !json.Valid(response) {
		response, _ = json.Marshal(string(response)) // A string has no error.
	}
	return sendResult{statusCode, id, response}
}

// typesOf maps the flags that are not for all types of calls to their types.
var typesOf = map[string][]string{"event": {"track"}, "name": {"page", "screen"}, "group-id": {"group"}, "previous-id": {"alias"}}

// propertiesOf maps the types of calls to the field that -p sets; alias and batch have none.
var propertiesOf = map[string]string{
	"identify": "traits", "group": "traits", "track": "properties", "page": "properties", "screen": "properties", "alias": "", "batch": "",
}

// newCall makes a call of fields that are not empty, and of properties NAME=VALUE in the field key.
func newCall(fields map[string]*string, key string, properties []string) ([]byte, error) {
	call := map[string]any{"messageId": uuid.NewString(), "timestamp": time.Now().UTC().Format("2006-01-02T15:04:05.000Z")}
	for name, value := range fields {
		if *value != "" {
			call[name] = *value
		}
	}
	values := map[string]any{}
	for _, p := range properties {
		name, text, ok := strings.Cut(p, "=")
		if !ok || key == "" {
			return nil, command.Usagef("-p %q: use NAME=VALUE, for identify, group, track, page and screen", p)
		}
		values[name] = text
		if json.Valid([]byte(text)) {
			values[name] = json.RawMessage(text) // A decoded number would lose digits.
		}
	}
	if len(values) > 0 {
		call[key] = values
	}
	return json.Marshal(call)
}
