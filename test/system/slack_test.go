package system

import (
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// With the two destinations of a sample, a dead letter becomes a message for Slack.
func TestDeadLetterNoticeInSlack(t *testing.T) {
	broken, slack := newReceiver(t), newReceiver(t)
	broken.set(func(int) int { return http.StatusUnprocessableEntity })
	sample, err := os.ReadFile("../../config/samples/slack_dead_letters.yaml")
	check.NoError(t, "read the sample", err)
	manifests := strings.NewReplacer("https://hooks.slack.example/services/T000/B000/demo", slack.URL+"/services/T000", "https://hooks.example/in",
		broken.URL).Replace(string(sample))
	p := start(t, map[string]string{"source.yaml": source(), "sample.yaml": manifests})
	p.builtIn = true
	p.condition("slack-dead-letters", "Programmed", "True", "")
	p.condition("crm", "Programmed", "True", "")
	p.mustPost("/v1/track", `{"userId":"u","event":"Order Completed","messageId":"m1"}`)
	r := p.arrive(slack, 1)[0]
	var message struct {
		Text   string
		Blocks []struct {
			Elements []struct{ Text string }
		}
	}
	check.NoError(t, "decode the message", json.Unmarshal([]byte(r.body), &message))
	check.Equal(t, "text", message.Text, "Dead letter of crm: Rejected")
	check.Equal(t, "first element of the context", message.Blocks[1].Elements[0].Text, "messageId m1")
	check.Equal(t, "second element of the context", strings.Contains(message.Blocks[1].Elements[1].Text, "answered 422"), true)
	check.Equal(t, "path", r.path, "/services/T000")
}
