package compile

import (
	"strings"

	"github.com/posthorn/posthorn/api/v1beta1"
)

// configMapPrefix cannot begin the name of a Secret.
const configMapPrefix = "configmap/"

// ConfigMapName returns the name of a ConfigMap in Snapshot.Secrets.
func ConfigMapName(name string) string { return configMapPrefix + name }

// CutConfigMap returns the name of a ConfigMap from its ConfigMapName; false for the name of a Secret.
func CutConfigMap(name string) (string, bool) { return strings.CutPrefix(name, configMapPrefix) }

// valueKind is a kind of object that values are read from, with its reasons of ResolvedRefs.
type valueKind struct{ kind, notFound, keyMissing, invalid string }

// valueKindOf returns the kind of a name in Snapshot.Secrets, and the name without the prefix.
func valueKindOf(name string) (valueKind, string) {
	if configMap, ok := CutConfigMap(name); ok {
		return valueKind{"ConfigMap", v1beta1.ReasonConfigMapNotFound, v1beta1.ReasonConfigMapKeyMissing,
			v1beta1.ReasonInvalidConfigMap}, configMap
	}
	return valueKind{"Secret", v1beta1.ReasonSecretNotFound, v1beta1.ReasonSecretKeyMissing, v1beta1.ReasonInvalidSecret}, name
}
