package standalone

import "github.com/posthorn/posthorn/api/v1beta1"

// replacedVersion is the API version before v1beta1.GroupVersion. Manifests with it are rejected with the fields to
// change, which are those that the present schema does not have.
var replacedVersion = v1beta1.GroupVersion.Group + "/v1alpha1"

// replacedFields are the fields of replacedVersion, or of a commit before the first release, that have another name or
// form now, without the indices of lists.
var replacedFields = map[string]string{
	"spec.enabled":                      "spec.suspend, with the opposite value",
	"spec.userId":                       "spec.userID",
	"spec.requestId":                    "spec.requestID",
	"spec.rate":                         "spec.deadLettersPerSecond",
	"spec.selector":                     "spec.match, in which noResponse: true replaces the status code 0",
	"spec.delivery.retry.minBackoff":    "spec.delivery.retry.initialBackoff",
	"spec.sourceRefs.namespace":         "always the namespace of the object; remove it",
	"spec.sourceRef.namespace":          "always the namespace of the object; remove it",
	"spec.endpoints.tls.caSecretKeyRef": "tls.ca.secretKeyRef",
	"spec.endpoints.authentication.oauth2.tls.caSecretKeyRef": "tls.ca.secretKeyRef",
}

// replacedValues are the values of fields that are written in another way now.
var replacedValues = map[string]string{
	"spec.filter.types: delete": "spec.deletions: Only, if there is no other type; no filter applies to delete",
}
