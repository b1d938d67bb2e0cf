package main

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// audienceOwner returns the URL of the pod that stores the audiences' members, or "" if it is this
// pod. The owner is pod 0 of the StatefulSet, which exists as long as any pod does. A pod whose
// name does not end in a number runs alone.
func audienceOwner(pod, namespace, service, listen string) string {
	set, number, ok := cutLast(pod, "-")
	if n, err := strconv.Atoi(number); !ok || err != nil || n < 1 {
		return ""
	}
	_, port, _ := net.SplitHostPort(listen)
	return "http://" + net.JoinHostPort(fmt.Sprintf("%s-0.%s.%s", set, cmp.Or(service, set), namespace), cmp.Or(port, "8080"))
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// peerService finds the headless Service of a StatefulSet's pod in the line that the kubelet writes
// to /etc/hosts: ADDRESS POD.SERVICE.NAMESPACE.svc.DOMAIN POD.
func peerService(hosts, pod, namespace string) string {
	for word := range strings.FieldsSeq(hosts) {
		if rest, ok := strings.CutPrefix(word, pod+"."); ok {
			if service, rest, ok := strings.Cut(rest, "."); ok && strings.HasPrefix(rest, namespace+".") {
				return service
			}
		}
	}
	return ""
}
