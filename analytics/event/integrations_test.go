package event

import (
	"testing"

	"github.com/posthorn/posthorn/analytics/internal/check"
)

func TestIntegrationsAllows(t *testing.T) {
	tests := []struct {
		object string
		want   bool // for a destination named "Webhooks", then "crm"
	}{
		{``, true}, {`null`, true}, {`{}`, true}, {`{"Other":false}`, true},
		{`{"All":false}`, false}, {`{"All":true}`, true},
		{`{"All":false,"Webhooks":true}`, true}, {`{"Webhooks":true,"All":false}`, true},
		{`{"All":false,"Webhooks":{}}`, true}, {`{"All":false,"Webhooks":{"a":[1,{"b":"}"}]},"x":1}`, true},
		{`{"Webhooks":false}`, false}, {`{"All":true,"Webhooks":false}`, false},
		{`{"webhooks":false}`, true}, {`{"ALL":false}`, true}, {`{"Crm":false}`, true}, // Names are case-sensitive.
		{`{"all":false}`, false}, {`{"all":false,"Webhooks":true}`, true}, {`{"crm":true,"all":false}`, true}, // One client writes "all".
		{`{"All":true,"all":false}`, true}, {`{"all":false,"All":true}`, true}, {`{"all":true,"All":null}`, true},
		{`{"All":false,"webhooks":true}`, false},
		{`{"crm":false}`, false}, {`{"All":false,"crm":true}`, true},
		{`{"Webhooks":true,"crm":false}`, false}, {`{"crm":false,"Webhooks":true}`, false}, // The most specific name decides.
		{`{"Webhooks":false,"crm":{}}`, true}, {`{"crm":true,"Webhooks":false,"All":false}`, true},
		{`{"Webhooks":null}`, true}, {`{"Webhooks":"false"}`, true}, {`{"All":0}`, true}, // These values are ignored.
		{`{"All":false,"Webhooks":1,"crm":null}`, false}, {`{"Webhooks":false,"crm":[]}`, false},
		{`{"W\u0065bhooks":false}`, false}, {`{"\"crm\"":false}`, true}, {`{"a\nb":false}`, true},
		{`{"crm":true,"crm":false}`, false},
	}
	for _, tt := range tests {
		in := `{"userId":"u"}`
		if tt.object != "" {
			in = `{"userId":"u","integrations":` + tt.object + `}`
		}
		b, err := request(Page).Parse([]byte(in))
		if err != nil {
			t.Fatal(err)
		}
		if got := b.Calls[0].Integrations.Allows("Webhooks", "crm"); got != tt.want {
			t.Errorf("Allows for %s: got %t, want %t", tt.object, got, tt.want)
		}
	}

	b, err := request(Page).Parse([]byte(`{"userId":"u","integrations":{"a\nb \"c\"":false,"All":true}}`))
	if err != nil {
		t.Fatal(err)
	}
	i := b.Calls[0].Integrations
	check.Equal(t, "Allows of a name with escapes", i.Allows("a\nb \"c\""), false)
	check.Equal(t, "Allows of another name", i.Allows("a"), true)
	check.Equal(t, "Allows without names", i.Allows(), true)
	check.Equal(t, "Allows of an empty object", (Integrations{}).Allows("x"), true)
}
