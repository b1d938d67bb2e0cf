package main

import "testing"

func TestAudienceOwner(t *testing.T) {
	const hosts = "127.0.0.1 localhost\n10.0.0.7\tposthorn-dispatcher-2.posthorn-dispatcher-pods.webhooks.svc.cluster.local\tposthorn-dispatcher-2\n"
	if got := peerService(hosts, "posthorn-dispatcher-2", "webhooks"); got != "posthorn-dispatcher-pods" {
		t.Errorf("peer service %q", got)
	}
	for _, other := range []struct{ hosts, pod, namespace string }{{"", "a-1", "b"}, {hosts, "posthorn-dispatcher", "webhooks"},
		{hosts, "posthorn-dispatcher-2", "web"}} {
		if got := peerService(other.hosts, other.pod, other.namespace); got != "" {
			t.Errorf("%+v: peer service %q", other, got)
		}
	}
	for _, c := range []struct{ pod, service, listen, want string }{
		{"posthorn-dispatcher-0", "pods", ":8080", ""},
		{"standalone", "", ":8080", ""},
		{"posthorn-dispatcher-abc", "", ":8080", ""},
		{"posthorn-dispatcher-2", "pods", ":9090", "http://posthorn-dispatcher-0.pods.webhooks:9090"},
		{"posthorn-dispatcher-12", "", "10.0.0.7:8080", "http://posthorn-dispatcher-0.posthorn-dispatcher.webhooks:8080"},
	} {
		if got := audienceOwner(c.pod, "webhooks", c.service, c.listen); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}
