"""The identity experiment: what each boot showed, the checks that hold it valid and restored, the rule that concludes."""
